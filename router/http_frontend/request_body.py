"""Reads the body of an HTTP request, within bounds on its size, its time and all bodies together.

Keeps no state.
"""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from baton.router.client_access.upload import UPLOAD_TIMEOUT_S, awaiting_upload
from baton.router.requests.admission import Admission
from baton.router.requests.body_budget import PROGRESS_BYTES, HeldBody
from baton.runtime.errors import Cancelled, InvalidRequest, TooLarge


async def read_body(
    request: Request, max_bytes: int, held: HeldBody, admission: Admission
) -> bytes:
    """Return the request's body. Raises InvalidRequest if it is compressed or does not come in
    time, TooLarge as soon as it passes the limit, with or without a Content-Length, Overloaded if
    it has to make room, RateLimited if the budget for bodies is used up."""
    _check_plain(request)
    too_large = TooLarge(f"the body is larger than {max_bytes} bytes: send less")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = reported = 0
    try:
        async with awaiting_upload("the body", UPLOAD_TIMEOUT_S, held, admission) as upload:
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_large
                held.hold(size)
                parts.append(part)
                if size - reported >= PROGRESS_BYTES:
                    reported = size
                    upload.record_progress()
    except ClientDisconnect as error:
        raise Cancelled("the client disconnected while sending its request") from error
    return b"".join(parts)


def _check_plain(request: Request) -> None:
    for header, plain in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
        sent = ", ".join(request.headers.getlist(header))
        if sent.lower() not in ("", plain):
            raise InvalidRequest(f"{header} is {sent[:40]!r}: send the body uncompressed", header)
