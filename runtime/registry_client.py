"""A registry as event loops use it: each call returns a future at once, and blocks nothing.

`ThreadedRegistry` does the file work in a thread of its own, which may hang as long as the file
system does: the loop, and with it leases and links, goes on. `InlineRegistry` is for a registry
in memory, in tests and in simulation: its futures are done when they are returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from baton.runtime import logs
from baton.runtime.dead_entries import SWEEP_S, DeadEntries
from baton.runtime.registry import Registry, WorkerRecord

log = logs.get(__name__)

T = TypeVar("T")

ANSWER_S = 2.0  # after which a registry counts as hung


class RegistryUnavailable(OSError):
    """The registry's server does not answer or refuses. The client has logged that already."""


class RegistryClient(Protocol):
    """Same methods as `Registry`, as futures. A future ends with what the method returns or raises,
    and not before the file system or the server answers: its caller bounds the wait."""

    def announce(self, record: WorkerRecord) -> asyncio.Future[None]: ...

    def withdraw(self, worker_id: str, boot_id: str) -> asyncio.Future[None]: ...

    def workers(self) -> asyncio.Future[list[WorkerRecord]]: ...

    def faults(self) -> Mapping[str, str]: ...

    async def close(self) -> None:
        """End what the client has begun. No other call follows."""
        ...


class InlineRegistry:
    """Calls `registry` at once."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def announce(self, record: WorkerRecord) -> asyncio.Future[None]:
        return _ended(partial(self._registry.announce, record))

    def withdraw(self, worker_id: str, boot_id: str) -> asyncio.Future[None]:
        return _ended(partial(self._registry.withdraw, worker_id, boot_id))

    def workers(self) -> asyncio.Future[list[WorkerRecord]]:
        return _ended(self._registry.workers)

    def faults(self) -> Mapping[str, str]:
        return self._registry.faults()

    async def close(self) -> None:
        """There is nothing to end."""


def _ended(work: Callable[[], T]) -> asyncio.Future[T]:
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    try:
        future.set_result(work())
    except OSError as error:
        future.set_exception(error)
    return future


@dataclass(slots=True)
class _Job:
    """`waiters` are futures of `loop`, and only that loop's thread touches them."""

    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    waiters: list[asyncio.Future[Any]]


class ThreadedRegistry:
    """Calls `registry` in a thread, one call after the other in the order of their kinds' first
    asking. A call that has not begun takes in later ones of its kind, so at most three wait
    however long the file system hangs; of announcements the last one counts. With `dead`, entries
    of dead workers are deleted every SWEEP_S, after a call."""

    def __init__(self, registry: Registry, dead: DeadEntries | None = None) -> None:
        self._registry = registry
        self._dead = dead
        self._sweep_at_s = 0.0
        self._lock = threading.Lock()  # of `_waiting` and `_running`
        self._waiting: dict[str, _Job] = {}  # by kind, the oldest first
        self._running = False

    def announce(self, record: WorkerRecord) -> asyncio.Future[None]:
        return self._ask("announce", partial(self._registry.announce, record))

    def withdraw(self, worker_id: str, boot_id: str) -> asyncio.Future[None]:
        return self._ask(
            f"withdraw {boot_id}", partial(self._registry.withdraw, worker_id, boot_id)
        )

    def workers(self) -> asyncio.Future[list[WorkerRecord]]:
        return self._ask("workers", self._registry.workers)

    def faults(self) -> Mapping[str, str]:
        return self._registry.faults()  # replaced as a whole by each look

    async def close(self) -> None:
        """Leave the thread to itself: it is a daemon, and its file system may hang."""

    def _sweep(self) -> None:
        if self._dead is not None and time.monotonic() >= self._sweep_at_s:
            self._sweep_at_s = time.monotonic() + SWEEP_S
            try:
                self._dead.sweep()
            except Exception:  # a bug in it must not end the thread that reads the registry
                log.exception("registry sweep failed")

    def _ask(self, kind: str, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._lock:
            waiters: list[asyncio.Future[Any]] = []
            if (job := self._waiting.get(kind)) is not None:
                waiters = [waiter for waiter in job.waiters if not waiter.done()]
            self._waiting[kind] = _Job(work, loop, [*waiters, future])
            if not self._running:
                try:
                    # a daemon: a process can end while its file system hangs
                    threading.Thread(target=self._run, name="registry", daemon=True).start()
                except RuntimeError as error:  # no thread or memory left: the next call tries again
                    del self._waiting[kind]
                    _settle([*waiters, future], None, OSError(f"registry: {error}"))
                else:
                    self._running = True
        return future

    def _run(self) -> None:
        """Do what waits, until nothing does."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                job = self._waiting.pop(next(iter(self._waiting)))
            error: Exception | None = None
            result = None
            try:
                result = job.work()
            except Exception as failed:  # raised to those that wait for it
                error = failed
            with contextlib.suppress(RuntimeError):  # the loop was closed: nothing waits
                job.loop.call_soon_threadsafe(_settle, job.waiters, result, error)
            self._sweep()


def _settle(waiters: list[asyncio.Future[Any]], result: Any, error: Exception | None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(result)
        else:
            waiter.set_exception(error)
            waiter.exception()  # its caller may have stopped waiting


def answer_within(work: Callable[[], T], within_s: float = ANSWER_S) -> T:
    """Call `work` for a program without an event loop. Raises what it raises, or TimeoutError
    when the file system has not answered in time; the call is then left behind in a thread."""
    results: list[T] = []
    failures: list[BaseException] = []

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised by the caller's thread
            failures.append(error)

    thread = threading.Thread(target=call, name="registry", daemon=True)
    thread.start()
    thread.join(within_s)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(hung(within_s))
    return results[0]


def hung(waited_s: float) -> str:
    """Return the error text for a registry that does not answer."""
    return f"no answer for {waited_s:g} s: see whether the registry's file system or server hangs"
