"""The middleware before every route: request ids, API keys or else allowed hosts, and
cross-origin requests.

Plain ASGI, so that disconnects and streams pass unchanged. Of the routes it knows only which ones
need no key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.router.client_access.client_identity import (
    ApiKeys,
    client_label,
    missing_key,
    new_request_id,
)
from baton.router.http_frontend.cors import Cors
from baton.router.http_frontend.http_error import HostNotAllowed, error_response
from baton.runtime import logs

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/version", "/metrics"})
_LOCAL_HOST = re.compile(
    rb"(localhost|[0-9]+(\.[0-9]+){3}|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.IGNORECASE
)
_LOCAL_ORIGIN = re.compile(
    rb"https?://(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE
)


_WITHOUT_KEYS = (
    "a server without router.api_keys accepts only localhost or an address, and no web page from "
    "another host: use one of these, or set router.api_keys"
)


def check_host(
    headers: Iterable[tuple[bytes, bytes]], cors: Cors, rule: str = _WITHOUT_KEYS
) -> None:
    """Refuse web pages of other hosts where no keys are required: then only local programs may
    call. A browser on this host could send requests for a foreign page, whose Origin is another
    host's, or whose own domain name, in Host, its DNS resolves to this host. Raises HostNotAllowed
    for any Host but localhost or an address, and for any other Origin unless `cors` allows it;
    `rule` says so in its message."""
    for header, value in headers:
        allowed = {b"host": _LOCAL_HOST, b"origin": _LOCAL_ORIGIN}.get(header)
        if header == b"origin" and cors.allows(value):
            continue
        if allowed is not None and not allowed.fullmatch(value):
            name = header.decode().title()
            raise HostNotAllowed(f"{name} is {value[:80].decode('latin-1')!r}: {rule}", name)


class AuthMiddleware:
    """Makes `scope["state"]["request_id"]` and sends it as X-Request-Id. A client's own
    X-Request-Id is only a label in the logs. `scope["state"]["tenant"]` is the digest of the
    request's API key, empty if none is required; then `check_host` applies. `cors_origins` are
    those of web pages that may call the API."""

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], cors_origins: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._keys = ApiKeys(api_keys)
        self._checks_host = not api_keys
        self._cors = Cors(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        given = dict(scope["headers"])
        origin = given.get(b"origin", b"")
        own = [(b"x-request-id", request_id.encode())]
        if self._cors.allows(origin):
            own += self._cors.headers(origin)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = [*message.get("headers", ()), *own]
                message = {**message, "headers": [*found, *_kept_open(scope, given, found)]}
            await send(message)

        label = client_label(given.get(b"x-request-id", b""))
        with logs.bind_request(request_id, client_label=label or ""):  # a text in all lines
            try:
                if self._checks_host:
                    check_host(scope["headers"], self._cors)
            except HostNotAllowed as error:
                await error_response(error)(scope, receive, send_with_id)
                return
            preflight = self._cors.preflight(scope, given) if self._cors.allows(origin) else None
            if preflight is not None:
                start = {"type": "http.response.start", "status": 204, "headers": preflight}
                await send_with_id(start)
                await send_with_id({"type": "http.response.body", "body": b""})
                return
            tenant = self._keys.tenant(given.get(b"authorization", b""))
            if tenant is None and scope["path"] not in OPEN_PATHS:
                await error_response(missing_key())(scope, receive, send_with_id)
                return
            state["tenant"] = tenant or b""
            await self._app(scope, receive, send_with_id)


def _kept_open(
    scope: Scope, head: Mapping[bytes, bytes], answer: Iterable[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    """Return the Connection header of an answer by HTTP/1.0: the connection stays open if the
    client asked for that and can see where the answer ends."""
    if scope["http_version"] != "1.0" or b"keep-alive" not in head.get(b"connection", b"").lower():
        return []
    sized = any(name == b"content-length" for name, _ in answer)
    return [(b"connection", b"keep-alive" if sized else b"close")]
