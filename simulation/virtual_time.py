"""Tests on virtual time: what takes an hour takes that hour and nothing else, and nobody waits.

    @on_virtual_time
    async def test_a_silence_ends_it() -> None: ...

For what keeps to asyncio alone: no sockets, no threads. Each test has a loop of its own, and what
still runs at its end ends with it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from baton.simulation.virtual_loop import VirtualLoop, run

Given = ParamSpec("Given")


def on_virtual_time(
    story: Callable[Given, Coroutine[Any, Any, None]],
) -> Callable[Given, None]:
    @functools.wraps(story)
    def play(*args: Given.args, **named: Given.kwargs) -> None:
        run(story(*args, **named))

    return play


def stand_still(seconds: float) -> None:
    """The process does nothing for so long: it cannot speak, nor hear, and its timers are late."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.world_s += seconds
