"""Waiting for a condition of which no event tells: with a limit, and an error that names it.

Where a future, an event, a pipe or a process can be awaited, await that instead.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import tokenize
from collections.abc import Awaitable, Callable

from tests.support.machine_speed import slowness

LIMIT_S = 60.0  # on a machine of usual speed
POLL_S = 0.01


async def eventually(
    condition: Callable[[], object],
    limit_s: float | None = None,
    *,
    every_s: float = POLL_S,
    show: Callable[[], object] | None = None,
    error: type[Exception] = AssertionError,
) -> None:
    """Wait until the condition, or what it returns once awaited, is true. Raises `error`, with
    what `show` returns, when it is not within `limit_s` on the loop's clock: a minute, and longer
    on a slow machine, where it is None."""
    limit_s = LIMIT_S * slowness() if limit_s is None else limit_s
    seen: object = "nothing"
    try:
        async with asyncio.timeout(limit_s) as limit:
            while True:
                found = condition()
                seen = await found if isinstance(found, Awaitable) else found
                if seen:
                    return
                await asyncio.sleep(every_s)  # no event tells: this function is for that
    except TimeoutError:
        if not limit.expired():
            raise  # the condition's own
    raise error(_failure(condition, limit_s, seen, show))


def wait_until(
    condition: Callable[[], object],
    limit_s: float | None = None,
    *,
    every_s: float = POLL_S,
    show: Callable[[], object] | None = None,
    error: type[Exception] = AssertionError,
) -> None:
    """Same as `eventually` for code without an event loop."""
    limit_s = LIMIT_S * slowness() if limit_s is None else limit_s
    deadline_s = time.monotonic() + limit_s
    while not (seen := condition()):
        if time.monotonic() >= deadline_s:
            raise error(_failure(condition, limit_s, seen, show))
        time.sleep(every_s)  # no event tells: this function is for that


def _failure(
    condition: Callable[[], object],
    limit_s: float,
    seen: object,
    show: Callable[[], object] | None,
) -> str:
    text = f"not true within {limit_s:g} s: {_source(condition)}; last seen: {seen!r}"
    return text if show is None else f"{text}\n{show()}"


def _source(condition: Callable[[], object]) -> str:
    """Return the condition as it is written, or its name."""
    name = getattr(condition, "__qualname__", repr(condition))
    if name.endswith("<lambda>"):
        try:
            return " ".join(inspect.getsource(condition).split())
        except (OSError, SyntaxError, tokenize.TokenError):
            pass  # not a statement of a file that can be read: the name has to do
    return name
