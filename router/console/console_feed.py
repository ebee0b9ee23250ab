"""Sends the console's state to the pages that are open: one computation a second for all of them.

    tick ─▶ observe ─▶ change ─┬─▶ mailbox of a page ─▶ its connection
                               └─▶ mailbox of a page ...

A page that reads slowly loses messages, never memory of the router: once its mailbox is full, it
gets the whole state when it reads again. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from baton.router.console.console_state import ConsoleState
from baton.runtime import metrics
from baton.runtime.errors import Overloaded, Unavailable

TICK_S = 1.0
MAX_VIEWERS = 16
MAILBOX = 4  # messages


class Viewer:
    """The mailbox of one open page."""

    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._messages: deque[bytes] = deque()
        self._behind = True  # it needs the whole state
        self._closed = False
        self._wake = asyncio.Event()
        self._wake.set()

    def __len__(self) -> int:
        """The number of messages that it holds."""
        return len(self._messages)

    def put(self, message: bytes) -> None:
        if len(self._messages) >= MAILBOX:
            self._messages.clear()
            self._behind = True
        if not self._behind:
            self._messages.append(message)
        self._wake.set()

    def close(self) -> None:
        """End the page's stream: the router stops."""
        self._closed = True
        self._wake.set()

    async def next(self) -> bytes | None:
        """Wait for the next message; None once the stream is closed."""
        while not (self._behind or self._messages or self._closed):
            self._wake.clear()
            await self._wake.wait()  # bounded by the next tick, or by `close`
        if self._closed:
            return None
        if self._behind:
            self._behind = False
            self._messages.clear()
            return self._state.whole()
        return self._messages.popleft()


class ConsoleFeed:
    """Ticks in `run`. `open` gives a page its mailbox until the block ends."""

    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._viewers: set[Viewer] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._viewers)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            # The console's period: pages show the state of each second.
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        begun_s = time.thread_time()
        self._state.observe()
        if self._viewers:
            message = self._state.change()
            for viewer in self._viewers:
                viewer.put(message)
        metrics.CONSOLE_SECONDS.inc(time.thread_time() - begun_s)

    @contextmanager
    def open(self) -> Iterator[Viewer]:
        """Raises Overloaded beyond MAX_VIEWERS pages, Unavailable once the router stops."""
        if self._closed:
            raise Unavailable("the router stops")
        if len(self._viewers) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} consoles are open at this router: close one")
        if not self._viewers:
            self._state.restart()
        viewer = Viewer(self._state)
        self._viewers.add(viewer)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    def close(self) -> None:
        """End all streams, now and from now on."""
        self._closed = True
        for viewer in self._viewers:
            viewer.close()
