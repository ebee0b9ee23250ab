"""The real `Engine`: a queue and one device thread that runs the steps.

    event loop ── submit ──▶ bounded queue ──▶ device thread ── call_soon_threadsafe ──▶ future

The loop that submits is the loop that awaits. The device thread alone touches the model and
writes the pool; it ends with `close`. Where steps run on after their start (a GPU), a second
thread waits for results while the device thread starts the next step.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.memory_plan import MemoryPlan
from baton.engine.scheduling.batch import RunningStep, StepBatch, StepResult, abandon
from baton.engine.scheduling.compile_clock import clock
from baton.engine.scheduling.draw_costs import ZERO_COSTS, DrawCosts
from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import BatonError, DeviceLost, EngineError

_CLOSE_S = 30.0


@dataclass(frozen=True, slots=True)
class _QueuedStep:
    batch: StepBatch
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[StepResult]


class Runner(Protocol):
    """The runner of a `TorchEngine`: `ModelRunner` or `CudaRunner`."""

    overlaps: bool  # whether `start` may return before the step ends

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def pool(self) -> KvPool: ...

    @property
    def max_context(self) -> int: ...

    @property
    def memory(self) -> MemoryPlan | None: ...

    @property
    def numerics(self) -> str | None: ...

    def start(self, batch: StepBatch) -> RunningStep: ...

    def close(self) -> None:
        """End what the runner has started, once no step is under way."""
        ...

    def measure_draws(self) -> DrawCosts: ...


class TorchHandle:
    """A submitted step. Several tasks may await it; cancelling one does not cancel the step."""

    def __init__(self, future: asyncio.Future[StepResult], timeout_s: float) -> None:
        self._future = future
        self._timeout_s = timeout_s

    async def result(self) -> StepResult:
        """Raises EngineError if the step failed, DeviceLost if it does not end in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(self._future)
        except TimeoutError as error:
            raise DeviceLost(f"the device returned no result within {self._timeout_s} s") from error

    def abandon(self) -> None:
        abandon(self._future)


class TorchEngine:
    """Runs the steps of one runner. A failed step fails alone; a failed copy fails every later
    step, since blocks then differ from what the caller expects."""

    def __init__(
        self,
        runner: Runner,
        *,
        threads: int = 0,
        queue_steps: int = 256,
        step_timeout_s: float = 300.0,
        device: torch.device | None = None,
        draw_costs: DrawCosts = ZERO_COSTS,
    ) -> None:
        """`threads` of the device thread's arithmetic; 0: torch's default. `device`: the GPU
        that the thread launches kernels on. `draw_costs`: measured by the runner."""
        self.draw_costs = draw_costs
        self._runner = runner
        self._threads = threads
        self._device = device
        self._step_timeout_s = step_timeout_s
        self._jobs: queue.Queue[_QueuedStep | None] = queue.Queue(maxsize=queue_steps)
        self._closed = False
        self._failure: Exception | None = None  # of a copy; used by the device thread alone
        # At most one step queued behind the running one: a third would overwrite their results.
        self._running: queue.Queue[tuple[_QueuedStep, RunningStep] | None] = queue.Queue(maxsize=1)
        self._threads_running = [threading.Thread(target=self._serve, name="device", daemon=True)]
        if runner.overlaps:
            self._threads_running.append(
                threading.Thread(target=self._deliver_results, name="results", daemon=True)
            )
        for thread in self._threads_running:
            thread.start()

    @property
    def spec(self) -> ModelSpec:
        return self._runner.spec

    @property
    def pool(self) -> KvPool:
        return self._runner.pool

    @property
    def max_context(self) -> int:
        return self._runner.max_context

    @property
    def memory(self) -> MemoryPlan | None:
        """Return the memory plan, if `build_engine` sized the pool."""
        return self._runner.memory

    @property
    def numerics(self) -> str | None:
        """Return the identifier of a deterministic engine's bits; else an empty string."""
        return self._runner.numerics

    @property
    def dtype_name(self) -> str:
        """Return the dtype of the KV: see `KvPool.kind`."""
        return self._runner.pool.kv_dtype

    def compiled_s(self) -> float:
        """Return the seconds that this process has spent compiling kernels, until now."""
        return clock.seconds()

    def submit(self, batch: StepBatch) -> TorchHandle:
        """Queue a step; must be called on a running event loop. Raises EngineError if the
        engine is closed or its queue is full."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        self._put(_QueuedStep(batch, loop, future))
        return TorchHandle(future, self._step_timeout_s)

    async def close(self) -> None:
        """Run the queued steps, then end the device thread. Idempotent. Raises EngineError
        if it does not end in time."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._jobs.put, None, timeout=_CLOSE_S)
        for thread in self._threads_running:
            await asyncio.to_thread(thread.join, _CLOSE_S)
            if thread.is_alive():
                raise EngineError(f"the {thread.name} thread did not end within {_CLOSE_S} s")
        await asyncio.to_thread(self._runner.close)

    def _put(self, job: _QueuedStep) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        try:
            self._jobs.put_nowait(job)
        except queue.Full as error:
            raise EngineError(f"{self._jobs.maxsize} steps are already queued") from error

    def _serve(self) -> None:
        """The device thread."""
        _name_in_the_kernel()
        if self._threads:
            torch.set_num_threads(self._threads)
        self._take_device()
        while (job := self._jobs.get()) is not None:
            self._step(job)
        if self._runner.overlaps:
            self._running.put(None)

    def _take_device(self) -> None:
        """Set CUDA's current device, which belongs to a thread: without it, the thread creates a
        context on the first GPU, which takes hundreds of MiB there."""
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        try:
            for source, target in copies:
                self._runner.pool.copy_block(source, target)
        except Exception as error:  # raised by the step's result
            self._failure = error

    def _step(self, job: _QueuedStep) -> None:
        if self._failure is None:
            self._copy(job.batch.copies)
        started: RunningStep | None = None
        failure: Exception | None = self._failure
        if failure is None:
            try:
                started = self._runner.start(job.batch)
            except Exception as error:  # raised to the waiter of the step
                failure = error
                clock.abort()  # a kernel may have failed to compile
        if started is None:
            _deliver(job.loop, lambda: _settle(job.future, None, failure))
        elif self._runner.overlaps:
            self._running.put((job, started))
        else:
            _finish(job, started)

    def _deliver_results(self) -> None:
        """The results thread: waits for steps while the device thread starts the next."""
        _name_in_the_kernel()
        self._take_device()
        while (step := self._running.get()) is not None:
            _finish(*step)


def _name_in_the_kernel() -> None:
    """Set the calling thread's name in /proc, which `top -H` and debuggers show. Python 3.14 does
    this itself."""
    comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    if comm.exists():
        comm.write_text(threading.current_thread().name)


def _finish(job: _QueuedStep, started: RunningStep) -> None:
    result: StepResult | None = None
    failure: Exception | None = None
    try:
        result = started.result()
    except Exception as error:  # raised to the waiter of the step
        failure = error
    _deliver(job.loop, lambda: _settle(job.future, result, failure))


def _settle(
    future: asyncio.Future[StepResult], result: StepResult | None, failure: Exception | None
) -> None:
    """Set the outcome on the event loop, translated into a BatonError."""
    if future.done():
        return  # the loop is shutting down and has cancelled it
    if result is not None:
        future.set_result(result)
        return
    if isinstance(failure, BatonError):
        future.set_exception(failure)
        return
    error = EngineError(f"the step failed: {failure}")
    error.__cause__ = failure
    future.set_exception(error)


def _deliver(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # No waiter is left: the loop that submitted the step is closed.
