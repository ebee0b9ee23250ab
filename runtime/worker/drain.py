"""How a worker process stops: it takes nothing new, finishes what it has, and hands back the rest.

    told ─▶ no intake ─▶ all has ended, or `drain_s` is over ─▶ the loop ends ─▶ ends: it leaves the
                                 └─ or told to end twice         registry, its readers' leases end,
                                                                 its server stops, its mover closes

What the loop leaves goes back to its routers and readers as Draining: they go on elsewhere at
once. A failing watch (too much quarantine, steps that all fail) drains too, and then ends the
process with its error. Knows neither role: both are a `Drainable`. The fault lab runs this too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from baton.runtime import logs
from baton.runtime.registry import Role

log = logs.get(__name__)

END_S = 5.0  # for a cancelled loop to close its handoffs
SERVER_GRACE_S = 0.5  # of a server that stops: what was said still goes out


class Drainable(Protocol):
    """A decode or prefill worker."""

    draining: asyncio.Event

    async def drain(self, within_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Ends:
    """What follows when a loop has ended: it leaves the registry (`withdraw`), what it owes to its
    peers ends (`finish`), then what serves them (`stop`), and what moves blocks (`close`)."""

    withdraw: Callable[[], Awaitable[None] | None]
    finish: Callable[[], Awaitable[None]]
    stop: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]


class Course:
    """What the process is told: the role to have, to drain and end, or by a signal to end. After
    a second signal, or where it could finish nothing, it drains no longer. Signals, the admin
    port and a watch call this."""

    def __init__(self, role: Role) -> None:
        self.role: Role | None = role  # None: end
        self.told = asyncio.Event()
        self.hurried = asyncio.Event()
        self._signalled = False

    def begin(self) -> Role | None:
        """The role to serve from now on; None: to end."""
        self.told.clear()
        return self.role

    def drain(self) -> None:
        """An order: as often as it comes, the worker drains and ends."""
        self.role = None
        self.told.set()

    def end(self) -> None:
        """A signal."""
        if self._signalled:
            self.hurry()
        self._signalled = True
        self.drain()

    def hurry(self) -> None:
        """Hand back at once what is left."""
        self.hurried.set()

    def change(self, role: Role) -> None:
        if self.role not in (None, role):
            self.role = role
            self.told.set()


async def serve_until(
    course: Course,
    worker: Drainable,
    running: asyncio.Task[None],
    watches: Collection[asyncio.Task[None]],
    drain_s: float,
    ends: Ends,
) -> None:
    """Until it is told another course, or until a watch or the loop, which is `running`, fails.
    Then drain the worker, end its loop and what follows, each of `ends` whatever becomes of the
    others, and raise what failed first, if something did: all are logged."""
    failures: list[BaseException] = []
    async with contextlib.AsyncExitStack() as stack:  # the last one first
        for end in (ends.close, ends.stop, ends.finish):
            stack.push_async_callback(_ended, failures, end)
        stack.push_async_callback(_ended, failures, ends.withdraw)
        failures += await _serve_until(course, worker, running, watches, drain_s)
    if failures:  # a loop that ends by itself ends the worker, loudly
        raise failures[0]


async def _ended(failures: list[BaseException], end: Callable[[], Awaitable[None] | None]) -> None:
    try:
        if (ending := end()) is not None:
            await ending
    except Exception as error:  # raised once the others have ended too
        log.error("the worker does not end well", why=str(error), exc_info=error)
        failures.append(error)


async def _serve_until(
    course: Course,
    worker: Drainable,
    running: asyncio.Task[None],
    watches: Collection[asyncio.Task[None]],
    drain_s: float,
) -> list[BaseException]:
    """What has failed, what failed first before."""
    told = asyncio.create_task(course.told.wait())
    tasks: list[asyncio.Task[Any]] = [running, told, *watches]
    try:
        # bounded by the process's owner: this is the worker's whole life
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await _drain(worker, running, course, drain_s)
    finally:
        failures = await _end(worker, tasks)
    return failures


async def _end(worker: Drainable, tasks: Collection[asyncio.Task[Any]]) -> list[BaseException]:
    """End the loop and all that watches it. Returns what has failed, what failed before first:
    a loop may also fail in its own end."""
    before = _failures(tasks)
    worker.draining.set()
    for task in tasks:
        task.cancel()
    _, left = await asyncio.wait(tasks, timeout=END_S)
    if left:
        log.error("a part of the worker does not end", parts=len(left), within_s=END_S)
    failures = before + [error for error in _failures(tasks) if error not in before]
    for error in failures:
        log.error("the worker ends by a failure", why=str(error), exc_info=error)
    return failures


def _failures(tasks: Collection[asyncio.Task[Any]]) -> list[BaseException]:
    over = [task for task in tasks if task.done() and not task.cancelled()]
    return [error for task in over if (error := task.exception()) is not None]


async def _drain(
    worker: Drainable, running: asyncio.Task[None], course: Course, drain_s: float
) -> None:
    within_s = 0.0 if course.hurried.is_set() else drain_s
    log.info("the worker drains", within_s=within_s)
    draining = asyncio.create_task(worker.drain(drain_s))
    hurried = asyncio.create_task(course.hurried.wait())
    # bounded by drain_s
    await asyncio.wait({draining, hurried, running}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, hurried):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
