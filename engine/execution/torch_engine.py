"""The real `Engine`: a queue and one device thread that runs the steps.

    event loop ── submit ──▶ bounded queue ──▶ device thread ── call_soon_threadsafe ──▶ future

The loop that submits is the loop that awaits. The device thread alone touches the model and
writes the pool; it ends with `close`. Where steps outlive their start (a GPU), a second thread
waits for results, and the device thread starts the next step meanwhile.
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
from baton.engine.scheduling.batch import Started, StepBatch, StepResult, forsake
from baton.engine.scheduling.compile_clock import clock
from baton.engine.scheduling.draw_costs import FREE, DrawCosts
from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import BatonError, DeviceLost, EngineError

_CLOSE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Step:
    batch: StepBatch
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[StepResult]


class Runner(Protocol):
    """Who runs the steps of a `TorchEngine`: `ModelRunner`, or `CudaRunner`."""

    overlaps: bool  # whether `start` may return before the step is over

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def pool(self) -> KvPool: ...

    @property
    def max_context(self) -> int: ...

    @property
    def memory(self) -> MemoryPlan | None: ...

    @property
    def numerics(self) -> str: ...

    def start(self, batch: StepBatch) -> Started: ...

    def measure_draws(self) -> DrawCosts: ...


class TorchHandle:
    """A step under way. Awaiting it from several tasks, or giving up, does not disturb it."""

    def __init__(self, future: asyncio.Future[StepResult], timeout_s: float) -> None:
        self._future = future
        self._timeout_s = timeout_s

    async def result(self) -> StepResult:
        """Raises EngineError if the step failed, DeviceLost if it is not done in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(self._future)
        except TimeoutError as error:
            raise DeviceLost(f"the device gave no result within {self._timeout_s} s") from error

    def forsake(self) -> None:
        forsake(self._future)


class TorchEngine:
    """Runs the steps of one `ModelRunner`. A failed step fails alone; a failed copy fails every
    later step, since their blocks are not what the caller believes."""

    def __init__(
        self,
        runner: Runner,
        *,
        threads: int = 0,
        queue_steps: int = 256,
        step_timeout_s: float = 300.0,
        device: torch.device | None = None,
        draw_costs: DrawCosts = FREE,
    ) -> None:
        """`threads` for the device thread's arithmetic; 0 leaves torch's own choice. `device`: the
        GPU that the thread's kernels are launched on, if it is one. `draw_costs`: as the runner
        has measured them."""
        self.draw_costs = draw_costs
        self._runner = runner
        self._threads = threads
        self._device = device
        self._step_timeout_s = step_timeout_s
        self._jobs: queue.Queue[_Step | None] = queue.Queue(maxsize=queue_steps)
        self._closed = False
        self._failure: Exception | None = None  # of a copy; the device thread's alone
        # One waits here while another is waited for: a third would write over their results.
        self._under_way: queue.Queue[tuple[_Step, Started] | None] = queue.Queue(maxsize=1)
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
        """What the memory goes to, where `build_engine` sized the pool."""
        return self._runner.memory

    @property
    def numerics(self) -> str:
        """Names the bits that this engine computes, where it is deterministic; else empty."""
        return self._runner.numerics

    @property
    def dtype_name(self) -> str:
        """Of the KV: see `KvPool.kind`."""
        return self._runner.pool.kind

    def compiled_s(self) -> float:
        """Seconds that this process has spent compiling kernels; they grow while it does."""
        return clock.seconds()

    def submit(self, batch: StepBatch) -> TorchHandle:
        """Queue a step; must be called on a running event loop. Raises EngineError if the
        engine is closed or its queue is full."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        self._put(_Step(batch, loop, future))
        return TorchHandle(future, self._step_timeout_s)

    async def close(self) -> None:
        """Finish what is queued, then end the device thread. Idempotent. Raises EngineError
        if it does not end in time."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._jobs.put, None, timeout=_CLOSE_S)
        for thread in self._threads_running:
            await asyncio.to_thread(thread.join, _CLOSE_S)
            if thread.is_alive():
                raise EngineError(f"the {thread.name} thread did not end within {_CLOSE_S} s")

    def _put(self, job: _Step) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        try:
            self._jobs.put_nowait(job)
        except queue.Full as error:
            raise EngineError(f"{self._jobs.maxsize} steps are queued already") from error

    def _serve(self) -> None:
        """The device thread."""
        _name_in_the_kernel()
        if self._threads:
            torch.set_num_threads(self._threads)
        self._take_device()
        while (job := self._jobs.get()) is not None:
            self._step(job)
        if self._runner.overlaps:
            self._under_way.put(None)

    def _take_device(self) -> None:
        """CUDA's current device is a thread's own; untold, a thread makes a context on the first
        GPU, and that costs hundreds of MiB there."""
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        try:
            for source, target in copies:
                self._runner.pool.copy_block(source, target)
        except Exception as error:  # told with the step's result
            self._failure = error

    def _step(self, job: _Step) -> None:
        if self._failure is None:
            self._copy(job.batch.copies)
        started: Started | None = None
        failure: Exception | None = self._failure
        if failure is None:
            try:
                started = self._runner.start(job.batch)
            except Exception as error:  # told to who awaits the step
                failure = error
                clock.give_up()  # it may have been a kernel that does not compile
        if started is None:
            _deliver(job.loop, lambda: _settle(job.future, None, failure))
        elif self._runner.overlaps:
            self._under_way.put((job, started))
        else:
            _finish(job, started)

    def _deliver_results(self) -> None:
        """The results thread: waits, while the device thread starts the next step."""
        _name_in_the_kernel()
        self._take_device()
        while (step := self._under_way.get()) is not None:
            _finish(*step)


def _name_in_the_kernel() -> None:
    """Of the calling thread, where there is /proc: what `top -H` and debuggers show. Python does
    so by itself from 3.14 on."""
    comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    if comm.exists():
        comm.write_text(threading.current_thread().name)


def _finish(job: _Step, started: Started) -> None:
    result: StepResult | None = None
    failure: Exception | None = None
    try:
        result = started.result()
    except Exception as error:  # told to who awaits the step
        failure = error
    _deliver(job.loop, lambda: _settle(job.future, result, failure))


def _settle(
    future: asyncio.Future[StepResult], result: StepResult | None, failure: Exception | None
) -> None:
    """On the event loop: hand the outcome over, translated into our error tree."""
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
        # Nobody can be waiting: the loop that submitted the step is gone.
