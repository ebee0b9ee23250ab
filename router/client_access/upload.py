"""The wait for what a client has to send: bounded in time, and ended early to make room.

Used by both front ends while a body or a message arrives. Knows no transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from baton.router.requests.admission import Admission
from baton.router.requests.body_budget import HeldBody
from baton.runtime.errors import InvalidRequest, Overloaded

UPLOAD_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Upload:
    """A body that arrives: call `record_progress` when some of it has come; `give_up` ends the
    wait with an error."""

    record_progress: Callable[[], None]
    give_up: Callable[[Overloaded], None]


@asynccontextmanager
async def awaiting_upload(
    what: str, timeout_s: float, body: HeldBody, admission: Admission | None
) -> AsyncIterator[Upload]:
    """Bound the wait for `what` a client has yet to send. Raises InvalidRequest if it does not
    come in time; Overloaded or RateLimited if it has to make room for others."""
    refusal: Overloaded | None = None

    def give_up(error: Overloaded) -> None:
        nonlocal refusal
        if not limit.expired() and refusal is None:
            refusal = error
            limit.reschedule(asyncio.get_running_loop().time())

    def make_room() -> None:
        give_up(
            Overloaded(f"too many requests arrive, and {what} was slow to come: try again later")
        )

    try:
        async with asyncio.timeout(timeout_s) as limit:
            with ExitStack() as stack:
                stack.enter_context(body.upload(give_up))
                record_progress = (
                    stack.enter_context(admission.upload(make_room)) if admission else _ignore
                )
                yield Upload(record_progress, give_up)
    except TimeoutError as error:
        raise refusal or InvalidRequest(f"{what} did not arrive within {timeout_s:g} s") from error


def _ignore() -> None:
    pass
