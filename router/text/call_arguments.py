"""The arguments of a call as text: what the router returns is what it reads when it is sent back.

Models write JSON that not every parser takes: half a surrogate pair, a number beyond a float's
range, nesting that templates would follow for long. Stateless.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

MAX_DEPTH = 32  # of lists and objects in a call's arguments
_WIDE = re.compile("[0-9]{19}")  # a number over 64 bits has as many digits at least


def read_arguments(text: str) -> dict[str, Any]:
    """Return the object that the text is. Raises ValueError, with the fault in words, if it is none
    or is nested over MAX_DEPTH deep."""
    try:
        found = orjson.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("it should be the text of a JSON object")
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(found):
        raise ValueError(f"it is nested over {MAX_DEPTH} deep, make it flatter")
    if _WIDE.search(text):
        exact: dict[str, Any] = json.loads(text)  # orjson rounds such a number
        return exact
    return found


def _is_too_deep(value: dict[str, Any]) -> bool:
    layer: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        layer = [
            inner
            for each in layer
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
    return bool(layer)
