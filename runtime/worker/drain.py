"""How a worker process stops: it takes nothing new, finishes what it has, and hands back the rest.

    stop ─▶ no intake ─▶ all has ended, or `drain_s` is over ─▶ the loop ends ─▶ ends: it leaves the
                                 └─ or a second signal           registry, its readers' leases end,
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

LOOP_END_TIMEOUT_S = 5.0  # for a cancelled loop to close its handoffs
SERVER_GRACE_S = 0.5  # for the server's last messages


class Drainable(Protocol):
    """A decode or prefill worker."""

    draining: asyncio.Event

    async def drain(self, within_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class ShutdownSteps:
    """The steps after the loop's end, in order: `withdraw` from the registry, `finish` what the
    worker owes its peers, `stop` the server, `close` the mover."""

    withdraw: Callable[[], Awaitable[None] | None]
    finish: Callable[[], Awaitable[None]]
    stop: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]


class RoleControl:
    """The role that the process should have, or that it should end. After a second signal, or
    when it can finish no request, it does not wait for its drain. Signals, orders and watches
    call this."""

    def __init__(self, role: Role) -> None:
        self.role: Role | None = role  # None: end
        self.changed = asyncio.Event()
        self.hurried = asyncio.Event()
        self._signalled = False

    def begin(self) -> Role | None:
        """Return the role to serve from now on; None to end."""
        self.changed.clear()
        return self.role

    def drain(self) -> None:
        """Drain and end: an order, which may be repeated."""
        self.role = None
        self.changed.set()

    def end(self) -> None:
        """Drain and end: a signal. The second one skips the drain."""
        if self._signalled:
            self.hurry()
        self._signalled = True
        self.drain()

    def hurry(self) -> None:
        """Hand all open requests back at once."""
        self.hurried.set()

    def change(self, role: Role) -> None:
        if self.role not in (None, role):
            self.role = role
            self.changed.set()


async def serve_until(
    control: RoleControl,
    worker: Drainable,
    running: asyncio.Task[None],
    watches: Collection[asyncio.Task[None]],
    drain_s: float,
    ends: ShutdownSteps,
) -> None:
    """Serve until the control asks for another role or for the end, or until a watch or the loop,
    which is `running`, fails. Then drain the worker, end its loop and what follows, each of `ends`
    whatever becomes of the others, and raise what failed first, if something did: all are
    logged."""
    failures: list[BaseException] = []
    async with contextlib.AsyncExitStack() as stack:  # the last one first
        for end in (ends.close, ends.stop, ends.finish):
            stack.push_async_callback(_ended, failures, end)
        stack.push_async_callback(_ended, failures, ends.withdraw)
        failures += await _serve_until(control, worker, running, watches, drain_s)
    if failures:  # a loop that ends by itself ends the worker, loudly
        raise failures[0]


async def _ended(failures: list[BaseException], end: Callable[[], Awaitable[None] | None]) -> None:
    try:
        if (ending := end()) is not None:
            await ending
    except Exception as error:  # raised once the others have ended too
        log.error("shutdown step failed", reason=str(error), exc_info=error)
        failures.append(error)


async def _serve_until(
    control: RoleControl,
    worker: Drainable,
    running: asyncio.Task[None],
    watches: Collection[asyncio.Task[None]],
    drain_s: float,
) -> list[BaseException]:
    """Return the failures, the first one first."""
    changed = asyncio.create_task(control.changed.wait())
    tasks: list[asyncio.Task[Any]] = [running, changed, *watches]
    try:
        # bounded by the process's owner: this is the worker's whole life
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await _drain(worker, running, control, drain_s)
    finally:
        failures = await _end(worker, tasks)
    return failures


async def _end(worker: Drainable, tasks: Collection[asyncio.Task[Any]]) -> list[BaseException]:
    """End the loop and its watches. Return the failures, earlier ones first: a loop may also fail
    while it ends."""
    before = _failures(tasks)
    worker.draining.set()
    for task in tasks:
        task.cancel()
    _, left = await asyncio.wait(tasks, timeout=LOOP_END_TIMEOUT_S)
    if left:
        log.error("worker tasks not ended", tasks=len(left), within_s=LOOP_END_TIMEOUT_S)
    failures = before + [error for error in _failures(tasks) if error not in before]
    for error in failures:
        log.error("worker failed", reason=str(error), exc_info=error)
    return failures


def _failures(tasks: Collection[asyncio.Task[Any]]) -> list[BaseException]:
    over = [task for task in tasks if task.done() and not task.cancelled()]
    return [error for task in over if (error := task.exception()) is not None]


async def _drain(
    worker: Drainable, running: asyncio.Task[None], control: RoleControl, drain_s: float
) -> None:
    within_s = 0.0 if control.hurried.is_set() else drain_s
    log.info("drain started", within_s=within_s)
    draining = asyncio.create_task(worker.drain(drain_s))
    hurried = asyncio.create_task(control.hurried.wait())
    # bounded by drain_s
    await asyncio.wait({draining, hurried, running}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, hurried):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
