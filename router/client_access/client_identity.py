"""Which client calls, for both front ends: API keys, tenants, request ids and labels of logs.

A tenant is the digest of an API key; the keys themselves are not kept.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence

from baton.runtime import metrics
from baton.runtime.errors import Unauthenticated

_LABEL = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")


class ApiKeys:
    """The API keys, kept as digests. Without any, no key is asked for."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    def tenant(self, authorization: bytes) -> bytes | None:
        """Return the tenant of a request, or None if it lacks a key. All digests are compared, so
        the time taken depends neither on a key's length nor on which key matched."""
        if not self._digests:
            return b""
        scheme, _, key = authorization.partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        matches = [known for known in self._digests if hmac.compare_digest(given, known)]
        return matches[0] if matches and scheme.lower() == b"bearer" else None


def missing_key() -> Unauthenticated:
    """Count a request without a valid key, and return its error."""
    metrics.REFUSALS.labels("unauthenticated").inc()
    return Unauthenticated("give one of this server's API keys as a Bearer token")


def new_request_id() -> str:
    return f"req-{secrets.token_hex(16)}"


def client_label(given: bytes) -> str | None:
    """Return a client's own request id as it may stand in logs; None if it is not valid."""
    return given.decode() if _LABEL.fullmatch(given) else None
