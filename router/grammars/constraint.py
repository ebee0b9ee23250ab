"""A constraint on the form of an answer, as a plain value, before a grammar is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import orjson

from baton.runtime.errors import InvalidRequest

Kind = Literal["json_schema", "regex", "choice", "grammar", "lark"]
MAX_CONSTRAINT_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class Constraint:
    """`body`: a schema, a pattern, a list of texts, or the text of a grammar; `field` is where the
    client wrote it. `envelope`: a Lark grammar around it, whose rule `@answer` it is. `whole`: the
    body has the marks that stand before an answer in the model's form."""

    kind: Kind
    body: Any
    field: str
    envelope: str = ""
    whole: bool = False

    def message(self) -> bytes:
        """Return it as JSON. Raises InvalidRequest if it is too large."""
        made = orjson.dumps({"kind": self.kind, "body": self.body, "envelope": self.envelope})
        if len(made) > MAX_CONSTRAINT_BYTES:
            raise InvalidRequest(
                f"{self.field} has {len(made)} bytes, at most {MAX_CONSTRAINT_BYTES} are taken: "
                "make it smaller",
                self.field,
            )
        return made


def message_key(message: bytes) -> bytes:
    """Name a constraint in a cache."""
    return blake2b(message, digest_size=16).digest()
