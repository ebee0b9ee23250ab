"""An asyncio event loop on virtual time: one seed, one order of events, no real waiting.

    ready ─▶ a round runs all that is ready ─▶ nothing ready: the clock jumps to the next timer

It has no selector, no threads and no signals: what an executor would do runs on the loop, and
`call_soon_threadsafe` is `call_soon`. Callbacks keep asyncio's order (first in, first out). Two
things are drawn from the seed: the order of timers of one instant and, with `shuffle`,
the order in which tasks that are ready in one round take their steps. Knows machines as owners
of callbacks (machine.py); owns the clock.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from heapq import heappop, heappush
from typing import Any, TypeVar

from baton.simulation.virtual.machine import OWNER, Machine

T = TypeVar("T")

ROUND_S = 1e-6  # every round takes time, as any code does: a caller that polls sees the clock run
_WORLD = Context()
CLOSE_TRIES = 20  # a coroutine's `finally` blocks may wait so often while it is closed


class Deadlock(RuntimeError):
    """Nothing is ready and no timer runs: the tasks that wait are named."""


class OutOfTime(RuntimeError):
    """The virtual time limit has passed: the tasks that wait are named."""


class VirtualTask(asyncio.Task[T]):
    """Hashes by a number, not by its address: sets of tasks have the same order in each run.
    The number is drawn at the first query."""

    __slots__ = ("_number",)

    def __hash__(self) -> int:
        return _number(self)


class VirtualFuture(asyncio.Future[T]):
    """Same as VirtualTask."""

    __slots__ = ("_number",)

    def __hash__(self) -> int:
        return _number(self)


def _number(future: Any) -> int:
    try:
        number: int = future._number
    except AttributeError:
        number = future._number = next(future.get_loop().numbers)
    return number


class _Soon:
    """The same interface as asyncio's handle. `_args` are the callback and its arguments. The
    loop makes it in place, and nothing more than it needs: a seed has two thousand."""

    __slots__ = ("_args", "_cancelled", "_context")
    _args: tuple[Any, ...]
    _context: Context
    _cancelled: bool

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled


class _Timer(_Soon):
    """Same as `_Soon`, for a timer."""

    __slots__ = ("_when",)
    _when: float

    def when(self) -> float:
        return self._when


_blank: Any = object.__new__


# What is not defined below raises NotImplementedError.
_LoopInterface: Any = asyncio.AbstractEventLoop


class VirtualLoop(_LoopInterface):  # type: ignore[misc]  # mypy knows no base that is Any
    """`trace`, if it is a list, gets a line for each callback that runs. `failures` are what a
    real loop would log: exceptions of callbacks, and of tasks whose exceptions were never
    retrieved."""

    def __init__(self, seed: int, *, shuffle: bool = False) -> None:
        self._dice = random.Random(seed)
        self._lot = self._dice.random
        self._shuffle = shuffle
        self.world_s = 0.0  # the time outside of all machines
        self._ready: deque[_Soon] = deque()
        self._timers: list[tuple[float, float, int, _Timer]] = []  # by time, then by lot
        self.numbers = itertools.count(1)
        # not of VirtualFuture[Any], which would give each one a dictionary that names it
        self.create_future: Callable[[], VirtualFuture[Any]] = partial(VirtualFuture, loop=self)
        self._owner: Machine | None = None
        self._generators: list[AsyncGenerator[Any, Any]] = []
        self._closed = False
        self._running = False
        self.steps = 0
        self.trace: list[str] | None = None
        self.failures: list[str] = []
        self.tasks: list[VirtualTask[Any]] = []
        self._many_tasks = 256  # more of them are looked through for those that are done

    # -- time and callbacks -------------------------------------------------------------------

    def time(self) -> float:
        """The clock of the machine whose callback runs; outside of machines, the world's."""
        owner = self._owner
        return self.world_s if owner is None else self.world_s * owner.rate + owner.offset_s

    # `call`: the callback and its arguments
    def call_soon(self, *call: Any, context: Context | None = None) -> _Soon:
        handle: _Soon = _blank(_Soon)
        handle._args = call
        handle._context = copy_context() if context is None else context
        handle._cancelled = False
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, *call: Any, context: Context | None = None) -> _Timer:
        return self._at(self.time() + delay, call, context)

    def call_at(self, when: float, *call: Any, context: Context | None = None) -> _Timer:
        return self._at(when, call, context)

    def _at(self, when: float, call: tuple[Any, ...], context: Context | None) -> _Timer:
        handle: _Timer = _blank(_Timer)
        handle._when = when
        handle._args = call
        handle._context = copy_context() if context is None else context
        handle._cancelled = False
        owner = self._owner
        if owner is not None:
            when = (when - owner.offset_s) / owner.rate
        if not self._closed:
            heappush(self._timers, (when, self._lot(), next(self.numbers), handle))
        return handle

    def call_world(self, when: float, *call: Any) -> None:
        """Call at a time of the world's clock, on no machine: it is neither paused nor killed."""
        if not self._closed:
            timer: _Timer = _blank(_Timer)
            timer._args = call
            timer._context = _WORLD
            timer._cancelled = False
            heappush(self._timers, (when, self._lot(), next(self.numbers), timer))

    def run_in_executor(
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call `func` on this loop, in the next round."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                # An executor hands each error of its function to the future.
                future.set_exception(error)

        self.call_soon(work)
        return future

    # -- futures and tasks --------------------------------------------------------------------

    def create_task(
        self,
        coro: Any,
        *,
        name: str | None = None,
        context: Context | None = None,
        **_: Any,
    ) -> asyncio.Task[Any]:
        task: VirtualTask[Any] = VirtualTask(
            coro, loop=self, name=name or coro.__qualname__, context=context
        )
        tasks = self.tasks
        tasks.append(task)
        if len(tasks) > self._many_tasks:
            self.tasks = [task for task in tasks if not task.done()]
            self._many_tasks = max(256, 4 * len(self.tasks))
        return task

    def get_task_factory(self) -> None:
        return None

    # -- running ------------------------------------------------------------------------------

    def run_until_complete(self, future: Any) -> Any:
        """Run a coroutine to its end. Raises Deadlock, or what the coroutine raised."""
        return self.run(future)

    def run(self, work: Coroutine[Any, Any, T], limit_s: float = float("inf")) -> T:
        """Same as `run_until_complete`, but raises OutOfTime once the clock passes `limit_s`."""
        asyncio._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generators.append)
        self._running = True
        try:
            main = self.create_task(work, name="main")
            self._rounds(main, limit_s)
            result: T = main.result()
            return result
        finally:
            self._running = False
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(None)

    def _rounds(self, main: asyncio.Task[Any], limit_s: float) -> None:
        """Round after round until `main` is done; each runs all that is ready. The innermost
        loop of every simulation."""
        ready, timers, owner_of, shuffle = self._ready, self._timers, OWNER, self._shuffle
        trace, next_ready = self.trace, self._ready.popleft
        while not main.done():
            now = self.world_s + ROUND_S
            if not ready:
                while timers and timers[0][3]._cancelled:
                    heappop(timers)
                if not timers:
                    raise Deadlock(f"nothing can happen any more; waiting: {self.waiting()}")
                if timers[0][0] > now:
                    now = timers[0][0]
            if now > limit_s:
                raise OutOfTime(f"{limit_s:g} s have passed; waiting: {self.waiting()}")
            self.world_s = now
            while timers and timers[0][0] <= now:
                ready.append(heappop(timers)[3])
            count = len(ready)
            if count > 1 and shuffle:
                self._mix(ready)
            for _ in range(count):
                handle = next_ready()
                if handle._cancelled:
                    continue
                context, call = handle._context, handle._args
                owner = self._owner = context.get(owner_of)
                if owner is not None and owner.stopped:
                    owner.keep(handle, self._resumed)
                    continue
                self.steps += 1
                if trace is not None:
                    self._note(call[0])
                try:
                    if len(call) == 1:  # as of most; at half of the cost
                        context.run(call[0])
                    else:
                        context.run(*call)
                except Exception as error:
                    # An error of one callback is reported, and the others run, as in asyncio's own
                    # loop.
                    self.failures.append(f"{_name(call[0])} raised {error!r}")
            self._owner = None

    def _note(self, callback: Callable[..., object]) -> None:
        assert self.trace is not None
        where = self._owner.name if self._owner is not None else "world"
        self.trace.append(f"{self.world_s:.6f} {where}: {_name(callback)}")

    def _resumed(self, kept: deque[_Soon]) -> None:
        self._ready.extend(kept)

    def _mix(self, ready: deque[_Soon]) -> None:
        """Steps of tasks change places with each other; plain callbacks keep theirs."""
        indices = [
            index
            for index, handle in enumerate(ready)
            if type(getattr(handle._args[0], "__self__", None)) is VirtualTask
        ]
        if len(indices) > 1:
            order = list(indices)
            self._dice.shuffle(order)
            steps = [ready[index] for index in order]
            for index, handle in zip(indices, steps, strict=True):
                ready[index] = handle

    def waiting(self) -> str:
        """The tasks that are not done, each with the line where it waits."""
        lines = []
        for task in self.tasks:
            if not task.done():
                frames = task.get_stack(limit=1)
                where = f" at {frames[-1].f_code.co_name}:{frames[-1].f_lineno}" if frames else ""
                lines.append(f"{task.get_name()}{where}")
        return "; ".join(lines) or "no task"

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every coroutine that has not ended, those of dead machines too; nothing runs
        on this loop any more. What their `finally` blocks do now is not observed."""
        self._closed = True
        asyncio._set_running_loop(self)
        try:
            self._ready = deque(maxlen=0)
            self._timers.clear()
            while self.tasks or self._generators:
                tasks, self.tasks = self.tasks, []
                for task in tasks:
                    if not task.done():
                        task._log_destroy_pending = False  # type: ignore[attr-defined] # asyncio declares no such name
                        _close(task.get_coro())
                generators, self._generators = self._generators, []
                for generator in generators:
                    _close(generator.aclose())
        finally:
            asyncio._set_running_loop(None)

    def is_closed(self) -> bool:
        return self._closed

    def is_running(self) -> bool:
        return self._running

    get_debug = staticmethod(bool)  # False; each future asks, and this is the quickest answer

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._closed:
            future = context.get("task") or context.get("future")
            what = future.get_coro() if isinstance(future, asyncio.Task) else future
            name = getattr(what, "__qualname__", "")
            self.failures.append(f"{name}: {context.get('message')}: {context.get('exception')!r}")


def run(work: Coroutine[Any, Any, T], seed: int = 0, *, shuffle: bool = False) -> T:
    """Run a coroutine on a virtual loop of its own. Raises what it raised, Deadlock, or
    RuntimeError if a callback or a forgotten task had failed."""
    loop = VirtualLoop(seed, shuffle=shuffle)
    try:
        result = loop.run(work)
        if loop.failures:
            raise RuntimeError("; ".join(loop.failures))
        return result
    finally:
        loop.close()


def _name(callback: Callable[..., object]) -> str:
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, VirtualTask):
        return str(owner.get_name())
    return str(getattr(callback, "__qualname__", type(callback).__name__))


def _close(coroutine: Any) -> None:
    """Throw GeneratorExit until it has ended; a `finally` block that waits is closed again."""
    for _ in range(CLOSE_TRIES):
        try:
            coroutine.close()
        except RuntimeError as error:
            if "ignored GeneratorExit" in str(error):
                continue
        except BaseException:
            # The simulation is over: what a coroutine raises as it is closed changes no result.
            pass  # of its last words; the simulation is over
        return
