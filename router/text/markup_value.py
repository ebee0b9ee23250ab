"""The JSON of a value that a model wrote as plain text, by the schema of its parameter.

    integer          5      ─▶ 5
    string           5      ─▶ "5"
    string or null   null   ─▶ null
    none given       [1]    ─▶ [1]       no  ─▶ "no"

A text that has no admitted type stays a string: the client sees what the model wrote, as with
arguments in JSON that break their schema. Stateless.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.router.text.call_form import SPACE
from baton.router.text.json_call import STRICT_JSON

ANY_TYPE = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
MAX_STEPS = 64  # through references and alternatives of a parameter's schema
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates print them


def json_value(text: str, key: str, schema: Mapping[str, Any]) -> str:
    """Return the argument `key` of a tool with this schema as JSON."""
    properties = schema.get("properties")
    given = properties.get(key) if isinstance(properties, Mapping) else None
    types = ANY_TYPE if given is None else value_types(given, schema)
    return _other(text, types) or json.dumps(text, ensure_ascii=False)


def _other(text: str, types: frozenset[str]) -> str | None:
    """Return the text as JSON that is no string; None if it is none of the types."""
    if types == {"string"}:
        return None
    stripped = text.strip(SPACE)
    written = _PYTHON.get(stripped, stripped)
    try:
        value, end = STRICT_JSON.raw_decode(written)
    except (ValueError, RecursionError):
        return None
    if end != len(written) or not type_names(value) & (types - {"string"}):
        return None
    return written


def type_names(value: object) -> frozenset[str]:
    """Return the names that JSON Schema has for the type of a value."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"array" if isinstance(value, list) else "object"})


def value_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that the schema of a parameter admits; all where `branches` finds none."""
    found: set[str] = set()
    for each in branches(schema, root):
        named = _named(each)
        if named is None:
            return ANY_TYPE
        found |= named
    return frozenset(found) or ANY_TYPE


def branches(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives of a parameter's schema, with references followed; none for what is
    no schema, or has over MAX_STEPS alternatives."""
    found: list[Mapping[str, Any]] = []
    layer, steps = [schema], 0
    while layer:
        each = layer.pop()
        steps += 1
        if not isinstance(each, Mapping) or steps > MAX_STEPS:
            return []
        inner = _alternatives(each, root)
        if inner is None:
            found.append(each)
        else:
            layer += inner
    return found


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any] | None:
    """Return the schemas of which one holds; None for a schema that stands for itself."""
    if "$ref" in schema:
        return [_resolved(schema, root)]
    every = schema.get("allOf")
    if isinstance(every, list) and len(every) == 1:
        return every
    if _named(schema) is None:
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return list(schema[key])
    return None


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference into the root's definitions names. For one that cannot be
    followed that is an empty schema, which admits all types."""
    reference = str(schema["$ref"])
    for name in ("$defs", "definitions"):
        defined = root.get(name)
        if reference.startswith(f"#/{name}/") and isinstance(defined, Mapping):
            return defined.get(reference.removeprefix(f"#/{name}/"), {})
    return {}


def _named(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that the schema itself names; None if it names none."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    values = enumerated(schema)
    return frozenset().union(*map(type_names, values)) if values else None


def enumerated(schema: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values of `const` or `enum`; none without them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []
