"""The base of all request models: fields that are refused, dropped or bounded.

Knows no request. Stateless.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from baton.router.requests.neutral_fields import Neutral

UNSUPPORTED = "unsupported"  # the type of the error; its context names the field
MAX_FIELDS = 128  # of one object
MAX_DEPTH = 32  # of lists and objects in a schema, or in a call's arguments
MAX_SCHEMA_VALUES = 8192  # of one function, or of one answer
MOST_VALUES = 1 << 16  # commas in a body


def at_most(entries: int, what: str) -> Callable[[Any], Any]:
    """Return a validator that refuses a larger object before its entries are read."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > entries:
            raise PydanticCustomError("too_long", f"give at most {entries} {what}")
        return value

    return check


def count_values(value: Any) -> int:
    """Return the number of values, nested ones included. Refuse nesting too deep for a template."""
    count, layer = 0, [value]
    for _ in range(MAX_DEPTH + 1):
        count += len(layer)
        nested = [each for each in layer if isinstance(each, dict | list)]
        if not nested:
            return count
        layer = [
            inner
            for each in nested
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    raise PydanticCustomError(
        "too_deep", "it is nested over {most} deep, make it flatter", {"most": MAX_DEPTH}
    )


few_fields = at_most(MAX_FIELDS, "fields")


class Body(BaseModel):
    """A request model. `neutral` maps fields that are not served to the values that are dropped."""

    model_config = ConfigDict(extra="forbid", strict=True)
    most_values: ClassVar[int] = MOST_VALUES
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        """Return the object without unknown fields that request nothing."""
        few_fields(value)
        known = _names_of(cls)
        if not isinstance(value, dict) or known.issuperset(value):
            return value
        kept = {}
        for name, given in value.items():
            if name in known or not (given is None or name in cls.neutral):
                kept[name] = given
            elif given is not None and not cls.neutral[name](given):
                raise PydanticCustomError(UNSUPPORTED, "it is not supported", {"field": name})
        return kept


@cache
def _names_of(shape: type[Body]) -> frozenset[str]:
    """Return the fields of `shape` by the names that clients write."""
    return frozenset(field.alias or name for name, field in shape.model_fields.items())
