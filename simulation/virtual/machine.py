"""A simulated machine with one process on it: it can be killed, paused, slowed, and has a clock.

Every callback and task that was spawned on a machine carries it in its context, and so does
whatever those start. The virtual loop asks before it runs one: of a paused machine it is kept
until `resume`, of a dead one for ever. So a process is stopped at any instant, without a word
from its code, and its clock continues to run. Knows no network; the loop owns the order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any

OWNER: ContextVar[Machine | None] = ContextVar("machine", default=None)


class Machine:
    """`rate` and `offset_s` make its own clock of the world's; `slowness` multiplies the time of
    what it computes. `address` may be another process's before and after."""

    def __init__(
        self, name: str, address: str, *, rate: float = 1.0, offset_s: float = 0.0
    ) -> None:
        self.name = name
        self.address = address
        self.rate = rate
        self.offset_s = offset_s
        self.slowness = 1.0
        self.hang_s = 0.0  # its next step takes so much longer
        self.alive = True
        self.silent = False  # dead without a word: no peer hears that its connections are gone
        self.stopped = False  # paused or dead
        self.kept: deque[Any] = deque()  # the loop's handles
        self.tasks: list[asyncio.Task[Any]] = []  # of a dead one nothing may be collected early
        self._resumed: Callable[[deque[Any]], None] | None = None
        self.context = Context()
        self.context.run(OWNER.set, self)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task of this machine's process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(work, name=f"{self.name} {name}", context=self.context.copy())

    def keep(self, handle: object, resumed: Callable[[deque[Any]], None]) -> None:
        """The loop's: this callback is due, and the process is stopped."""
        self.kept.append(handle)
        self._resumed = resumed

    def pause(self) -> None:
        self.stopped = True

    def resume(self) -> None:
        """Everything that became due in the pause runs now, in its order."""
        if not self.alive:
            return
        self.stopped = False
        if self._resumed is not None:
            kept, self.kept = self.kept, deque()
            self._resumed(kept)

    def kill(self, *, silent: bool = False) -> None:
        """End as by kill -9, or by loss of power (`silent`): no handler of its code runs."""
        self.alive = False
        self.silent = silent
        self.stopped = True
