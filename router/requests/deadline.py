"""A request's deadline: read from the client's header, and enforced.

    X-Request-Deadline: 2.5        seconds from the arrival of the request's head, a decimal

Deadlines are times on the event loop's clock. Knows no route and no worker; holds no state.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from baton.runtime import metrics
from baton.runtime.errors import BatonError, DeadlineExceeded, InvalidRequest

HEADER = "x-request-deadline"
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


def deadline_of(given: Sequence[str], arrival_s: float, longest_s: float) -> float:
    """Return when a request must be over. `given` are the header's values as they came; without
    any it is `longest_s` after the arrival.

    Raises InvalidRequest for two headers, for what is not a plain decimal, and for a number
    that is not above 0 and at most `longest_s`."""
    if not given:
        return arrival_s + longest_s
    text = given[0].strip()
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if len(given) > 1 or not 0 < seconds <= longest_s:
        raise InvalidRequest(
            f"X-Request-Deadline is {', '.join(given)[:100]!r}: give one number of seconds from "
            f"now, as 2.5, above 0 and at most {longest_s:g}",
            "X-Request-Deadline",
        )
    return arrival_s + seconds


@asynccontextmanager
async def until(deadline_s: float) -> AsyncIterator[None]:
    """Cancel the block at the deadline, and raise DeadlineExceeded then; a TimeoutError of the
    block passes unchanged."""
    scope = asyncio.timeout_at(deadline_s)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise passed("receiving") from error


def passed(phase: str, waited_for: BatonError | None = None) -> DeadlineExceeded:
    """Count the deadline and return the error. `phase` is one of the metric's labels; `waited_for`
    is why the request could not go on."""
    metrics.DEADLINES_PASSED.labels(phase).inc()
    reason = "" if waited_for is None else f" while it waited: {waited_for}"
    return DeadlineExceeded(f"the request's deadline has passed{reason}")
