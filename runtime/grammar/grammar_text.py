"""Turns a client's constraint into a grammar in llguidance's form.

    json_schema  ─▶ compact JSON: no white space between tokens
    regex, choice, grammar (Lark, or EBNF with `::=`)

White space between the tokens of JSON is not admitted: a model that may write it can write it
without end. An object whose schema names its properties and says nothing of others has no others:
that is narrower than the schema, so what is made is valid. So are integers without bounds, which
are those that every reader keeps exactly, and numbers between bounds, which have 9 digits after
the point at most; and formats have the lengths of their standards. Stateless.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from baton.runtime.errors import InvalidRequest

MAX_INTEGER = (1 << 53) - 1  # what every reader of JSON keeps exactly (RFC 8259, section 6)
FORMAT_CHARS = {"date-time": 35, "time": 24, "duration": 32, "email": 254, "hostname": 253}
SMALLEST_STEP = 1e-9  # between numbers of a bounded range
LEAST_RANGE = 1e-3  # of a range whose numbers have such steps
JSON_OPTIONS: Any = {"whitespace_flexible": False, "lenient": False}
# Models are trained on calls that templates print with a space after each separator.
CALL_OPTIONS: Any = JSON_OPTIONS | {"key_separator": ": ", "item_separator": ", "}
_OPTIONS_KEY = "x-guidance"
_MISSING_RULE = re.compile(r"Rule '(.+)' not found")
_OPEN_KEYS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef")
_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA_KEYS = ("const", "default", "enum", "example", "examples")  # values, not schemas


def json_schema_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar of all compact JSON texts that are valid by the schema. Raises
    InvalidRequest for a number that the library cannot hold."""
    try:
        return LLMatcher.grammar_from_json_schema(prepared_schema(schema), overrides=JSON_OPTIONS)
    except ValueError as error:
        raise InvalidRequest(f"the schema cannot be read: {str(error)[:200]}") from error


def inline_schema(schema: dict[str, Any], options: Any = JSON_OPTIONS) -> str:
    """Return the right side of a Lark rule for JSON that is valid by the schema."""
    return "%json " + json.dumps({**prepared_schema(schema), _OPTIONS_KEY: options})


def regex_grammar(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: list[str]) -> str:
    return lark_grammar("start: " + " | ".join(quoted(choice) for choice in choices))


def ebnf_grammar(text: str) -> str:
    """Return the grammar of a Lark text, or of one in EBNF whose rules have `::=`. Raises
    InvalidRequest with the line for EBNF that cannot be read."""
    try:
        return lark_grammar(any_to_lark(text))
    except Exception as error:  # the library raises Exception itself for a missing rule
        reason = f"{str(error)[:200]}{_line_of_rule(text, str(error))}"
        raise InvalidRequest(f"the EBNF cannot be read: {reason}") from error


def _line_of_rule(text: str, reason: str) -> str:
    """Return " at line N" for a rule that is used there first, and missing."""
    found = _MISSING_RULE.match(reason)
    used = found and re.search(rf"(?<![\w-]){re.escape(found[1])}(?![\w-])", text)
    return f" at line {text.count(chr(10), 0, used.start()) + 1}" if used else ""


def lark_grammar(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def enclosed(text: str, envelope: str) -> str:
    """Return the grammar of a Lark text in which `@answer` is the grammar `text`."""
    answer, *others = json.loads(text)["grammars"]
    return json.dumps(
        {"grammars": [{"lark_grammar": envelope}, answer | {"name": "answer"}, *others]}
    )


def quoted(text: str) -> str:
    """Return a Lark string for the text."""
    return json.dumps(text, ensure_ascii=False)


def prepared_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without options for llguidance, with objects closed where that is safe."""
    closes = not any("allOf" in each for each in objects(schema, _DATA_KEYS))
    made: dict[str, Any] = _prepared(schema, closes)
    return made


def _prepared(value: Any, closes: bool, *, by_name: bool = False) -> Any:
    """`by_name`: `value` has schemas by name, and is none itself."""
    if isinstance(value, list):
        return [_prepared(each, closes) for each in value]
    if not isinstance(value, dict):
        return value
    if by_name:
        return {name: _prepared(each, closes) for name, each in value.items()}
    made = {
        key: each if key in _DATA_KEYS else _prepared(each, closes, by_name=key in _MAP_KEYS)
        for key, each in value.items()
        if key != _OPTIONS_KEY
    }
    if closes and _names_members(value):
        made["additionalProperties"] = False
    return {**made, **_number_bounds(value), **_format_bound(value)}


def _format_bound(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the greatest length of a text of the schema's format, where the schema has none."""
    length = FORMAT_CHARS.get(str(schema.get("format")))
    return {} if length is None or "maxLength" in schema else {"maxLength": length}


def _number_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return bounds where a schema of numbers has none: a model may write digits without end."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if "enum" in schema or "const" in schema:
        return {}
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if "integer" in kinds and "number" not in kinds:
        bounds = {} if low is not None else {"minimum": -MAX_INTEGER}
        return bounds if high is not None else {**bounds, "maximum": MAX_INTEGER}
    if "number" not in kinds or "multipleOf" in schema:
        return {}
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return {}
    return {"multipleOf": SMALLEST_STEP} if high - low >= LEAST_RANGE else {}


def _names_members(schema: dict[str, Any]) -> bool:
    """Return whether the schema of an object names members and says nothing of others."""
    kind = schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        return False
    named = isinstance(schema.get("properties"), dict) and bool(schema["properties"])
    return named and not any(key in schema for key in (*_OPEN_KEYS, *_COMBINED))


def objects(value: Any, skipped: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield each object in a value, but for those below a `skipped` key."""
    layer = [value]
    while layer:
        each = layer.pop()
        if isinstance(each, list):
            layer += each
        elif isinstance(each, dict):
            yield each
            layer += [inner for key, inner in each.items() if key not in skipped]


def subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of a schema with its path, the outermost first. Paths take memory: each
    has the names of all objects around it."""
    layer = [(path, schema)]
    while layer:
        own_path, each = layer.pop()
        if isinstance(each, list):
            layer += [(f"{own_path}[{index}]", inner) for index, inner in enumerate(each)]
        elif isinstance(each, dict):
            yield own_path, each
            for key, inner in each.items():
                if key not in _DATA_KEYS:
                    layer.append((f"{own_path}.{key}".removeprefix("."), inner))
