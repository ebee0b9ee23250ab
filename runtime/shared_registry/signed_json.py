"""JSON with the signature of one of a cluster's tokens: what processes leave on a shared server.

Every process that can write to the server can write such a text, so it counts only with a valid
signature. `purpose` separates kinds of texts: a signature of one kind is none of another. Pure.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

_SIGNATURE_BYTES = 16
_SIGNATURE = "signature"


@dataclass(frozen=True, slots=True)
class SignedJson:
    """Signs with the first of `tokens`; accepts the signatures of all of them. `purpose` has at
    most 16 bytes; `fields` are those of a text, `noun` its kind in messages."""

    tokens: tuple[str, ...] = field(repr=False)
    purpose: bytes
    fields: frozenset[str]
    max_bytes: int
    noun: str

    def write(self, content: Mapping[str, object]) -> bytes:
        """Return the content as a signed text."""
        return json.dumps(
            {**content, _SIGNATURE: self._signature(self.tokens[0], content)}
        ).encode()

    def read(self, text: bytes) -> dict[str, Any] | str:
        """Return the fields of a text, whose values are not checked, or why it does not count."""
        if len(text) > self.max_bytes:
            return f"it is longer than {self.max_bytes} bytes"
        unknown = f"it is no {self.noun} of this version"
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or found.keys() ^ {*self.fields, _SIGNATURE}:
                return unknown
            signature = str(found.pop(_SIGNATURE)).encode(errors="replace")
            signatures = (self._signature(token, found).encode() for token in self.tokens)
            if any(hmac.compare_digest(signature, each) for each in signatures):
                return found
        except (ValueError, TypeError, RecursionError):  # also of what is written again to check it
            return unknown
        return "it is not signed with this cluster's token"

    def _signature(self, token: str, content: Mapping[str, object]) -> str:
        key = blake2b(token.encode(), digest_size=32, person=self.purpose).digest()
        text = json.dumps(content, sort_keys=True)
        return blake2b(text.encode(), key=key, digest_size=_SIGNATURE_BYTES).hexdigest()
