"""Tests on virtual time: what takes an hour takes that hour and nothing else, and no real time
passes.

    @on_virtual_time
    async def test_a_silence_ends_it() -> None: ...

For what keeps to asyncio alone: no sockets, no threads. Each test has a loop of its own. What a
fixture hands out and wants to see ended in order, it gives to `at_the_end`; what still runs after
that ends with the loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any, ParamSpec

from baton.simulation.virtual.virtual_loop import VirtualLoop, run

Given = ParamSpec("Given")
_ENDS: ContextVar[AsyncExitStack] = ContextVar("ends")


def on_virtual_time(
    story: Callable[Given, Coroutine[Any, Any, None]],
) -> Callable[Given, None]:
    async def whole(*args: Given.args, **named: Given.kwargs) -> None:
        async with AsyncExitStack() as ends:
            _ENDS.set(ends)
            await story(*args, **named)

    @functools.wraps(story)
    def play(*args: Given.args, **named: Given.kwargs) -> None:
        run(whole(*args, **named))

    return play


def at_the_end(end: Callable[[], Awaitable[None]]) -> None:
    """Run `end` at the end of the running story, however it ends; the last one first. Raises
    LookupError outside."""
    _ENDS.get().push_async_callback(end)


def stand_still(seconds: float) -> None:
    """The process does nothing for so long: it cannot speak, nor hear, and its timers are late."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.world_s += seconds
