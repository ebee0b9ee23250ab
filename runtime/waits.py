"""Waits for a future of another owner without cancelling it, and ends the caller's own tasks.

`asyncio.wait` and `gather` do that for many, with sets and callbacks that count. The loops of the
workers and their handoffs wait for one, or end two or three, hundreds of times a second. Holds
no state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


async def done_within(future: asyncio.Future[Any], within_s: float | None = None) -> bool:
    """Wait until a future is done, at most `within_s`, and return whether it is. Its exception
    stays in it."""
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


async def cancel_all(tasks: Sequence[asyncio.Task[Any]], again_s: float | None = None) -> None:
    """Cancel tasks, and return once all have ended, whatever they raise. If the caller is cancelled
    while waiting, all tasks still end, then CancelledError is raised. A task that has not ended
    after `again_s` is cancelled again, for parts that may lose a cancellation."""
    for task in tasks:
        task.cancel()
    cancelled = False
    for task in tasks:
        while not task.done():
            try:
                if not await done_within(task, again_s):
                    task.cancel()
            except asyncio.CancelledError:
                cancelled = True
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved
    if cancelled:
        raise asyncio.CancelledError


async def run_until_first_ends(
    *parts: Coroutine[Any, Any, None], cancel_again_s: float | None = None
) -> None:
    """Run parts of one thing, each a task, until one ends; end the others as `cancel_all` does.
    Raises what the first one raised; if it just ended, what another did in its end."""
    loop = asyncio.get_running_loop()
    first: asyncio.Future[asyncio.Task[None]] = loop.create_future()

    def record_first(task: asyncio.Task[None]) -> None:
        if not first.done():
            first.set_result(task)

    tasks = [asyncio.create_task(part) for part in parts]
    for task in tasks:
        task.add_done_callback(record_first)
    try:
        await first
    finally:
        await cancel_all(tasks, cancel_again_s)
    for task in (first.result(), *tasks):
        if not task.cancelled():
            task.result()
