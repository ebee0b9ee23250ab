"""Cross-origin requests of web pages: the allowed origins, and answers to browsers' preflights.

Off unless `router.cors_origins` names origins. A page of a listed origin may call the API from a
browser, with an API key like every other client. Knows no route. Stateless.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.types import Scope

PREFLIGHT_MAX_AGE_S = 600  # for which a browser caches the answer
EXPOSED = b"x-request-id, retry-after"
_NAMES = re.compile(rb"[A-Za-z0-9_, \-]{1,2048}")  # of request headers
_Headers = list[tuple[bytes, bytes]]


class Cors:
    """`origins` as browsers send them (scheme://host:port); `*` allows all."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._every = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def allows(self, origin: bytes) -> bool:
        return bool(origin) and (self._every or origin in self._origins)

    def headers(self, origin: bytes) -> _Headers:
        """Return the headers that let a page of an allowed origin read an answer."""
        return [
            (b"access-control-allow-origin", b"*" if self._every else origin),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"Origin"),
        ]

    def preflight(self, scope: Scope, given: dict[bytes, bytes]) -> _Headers | None:
        """Return the headers that answer a browser's preflight; None if `scope` is none. A
        preflight carries no key and runs nothing."""
        if scope["method"] != "OPTIONS" or b"access-control-request-method" not in given:
            return None
        names = given.get(b"access-control-request-headers", b"")
        found = [(b"access-control-allow-methods", b"GET, POST")]
        if _NAMES.fullmatch(names):
            found.append((b"access-control-allow-headers", names))
        found.append((b"access-control-max-age", str(PREFLIGHT_MAX_AGE_S).encode()))
        return found
