"""Waiting for a future of another's: whoever is cancelled or out of time leaves it as it is.

`asyncio.wait` does that for many futures, with sets and a callback that counts. The loops of the
workers and their handoffs wait for one, hundreds of times a second. Holds no state.
"""

from __future__ import annotations

import asyncio
from typing import Any


async def over(future: asyncio.Future[Any], within_s: float | None = None) -> bool:
    """Wait until a future is done, at most `within_s`; whether it is. What it raises is for who
    asks for its result."""
    if future.done():
        return True
    if within_s is not None and within_s <= 0:
        return False
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    future.add_done_callback(wake)
    timer = None if within_s is None else loop.call_later(within_s, wake)
    try:
        await waiter
    finally:
        future.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()
    return future.done()
