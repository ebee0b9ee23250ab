"""Where in a schema that cannot be compiled the fault is: llguidance names what, but not where.

    Invalid type: strin  ─▶  properties.a.type

Only errors that name a keyword or its value are found. Stateless.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from baton.runtime.grammar.grammar_text import subschemas

Fault = Callable[[str, Any], bool]  # of a keyword and its value

_VALUE = re.compile(r"(Invalid type|Unknown format): (.+)")
_PATTERN = re.compile(r"invalid regex (['\"])(.*)\1 at character")
_POINTER = re.compile(r"(?:Pointer|Resource) '(.+?)' ")
_EXPECTED = re.compile(r"Expected .+ for '(\w+)', got (.+)")
_KIND = re.compile(r"(\w+) must be an? (array|object|string)")
_KINDS: dict[str, Any] = {"array": list, "object": dict, "string": (str, list)}


def path_of_fault(schema: Any, reason: str) -> str | None:
    """Return the path of the keyword that an error speaks of; None where it is not found. Costs
    O(values of the schema)."""
    is_fault = _fault(reason)
    if is_fault is None:
        return None
    for path, each in subschemas(schema):
        for key, value in each.items():
            if is_fault(key, value):
                return f"{path}.{key}".removeprefix(".")
    return None


def _fault(reason: str) -> Fault | None:
    if (found := _VALUE.match(reason)) is not None:
        keyword, wrong = ("type" if found[1] == "Invalid type" else "format"), found[2]
        return lambda key, value: (
            key == keyword and (value == wrong or (isinstance(value, list) and wrong in value))
        )
    if (found := _PATTERN.match(reason)) is not None:
        pattern = found[2]
        return lambda key, value: (
            (key == "pattern" and _echo(value) == pattern)
            or (isinstance(value, dict) and _echo(key) == pattern)
        )
    if (found := _POINTER.match(reason)) is not None:
        target = found[1]
        return lambda key, value: key == "$ref" and str(value).endswith(target)
    if (found := _EXPECTED.match(reason)) is not None:
        named, given = found[1], found[2]
        return lambda key, value: key == named and json.dumps(value) == given
    if (found := _KIND.match(reason)) is not None:
        named, kind = found[1], _KINDS[found[2]]
        return lambda key, value: key == named and not isinstance(value, kind)
    return None


def _echo(pattern: Any) -> str:
    """Return the pattern as its error shows it."""
    return repr(str(pattern)[:100])[1:-1]
