"""JSON schemas of the kinds found in JSONSchemaBench, made by families from a seed.

A family is a function of a generator; each of its schemas differs by sizes, names and values. None
is a copy of a published schema. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
Family = Callable[[random.Random], Schema]
EACH = 18  # schemas of a family
UNBOUNDED = 4  # of a family whose values have no bound: there a small model repeats itself
_NAMES = (
    *("name", "city", "count", "price", "kind", "tags", "owner", "email", "active", "level"),
    *("width", "height", "created", "status", "note", "size", "übung", "名前", "id", "parent"),
)
_WORDS = (
    "red",
    "green",
    "blue",
    "open",
    "closed",
    "north",
    "south",
    "größer",
    "日本",
    "a b",
    "x/y",
)


def _names(draws: random.Random, count: int) -> list[str]:
    return draws.sample(_NAMES, count)


def _text(draws: random.Random) -> Schema:
    return {"type": "string", "maxLength": draws.randrange(3, 16)}


def _leaf(draws: random.Random) -> Schema:
    low = draws.randrange(-50, 50)
    return draws.choice(
        [
            _text(draws),
            {"type": "integer", "minimum": low, "maximum": low + draws.randrange(1, 500)},
            {"type": "number", "minimum": 0, "maximum": draws.randrange(1, 90)},
            {"type": "boolean"},
            {"enum": draws.sample(_WORDS, 3)},
            {"type": ["integer", "null"]},
        ]
    )


def _object(draws: random.Random, members: dict[str, Schema], *, optional: int = 0) -> Schema:
    names = list(members)
    required = names[: max(1, len(names) - optional)]
    made: Schema = {"type": "object", "properties": members, "required": required}
    if draws.random() < 0.7:
        made["additionalProperties"] = False
    return made


def flat_objects(draws: random.Random) -> Schema:
    count = draws.randrange(1, 7)
    members = {name: _leaf(draws) for name in _names(draws, count)}
    return _object(draws, members, optional=draws.randrange(2))


def nested_objects(draws: random.Random) -> Schema:
    made = _leaf(draws)
    for name in _names(draws, draws.randrange(2, 6)):
        made = _object(draws, {name: made, "at": _leaf(draws)})
    return made


def enums(draws: random.Random) -> Schema:
    values: list[Any] = [*draws.sample(_WORDS, 4), draws.randrange(100), None, True, 1.5]
    return _object(draws, {name: {"enum": draws.sample(values, 3)} for name in _names(draws, 3)})


def constants(draws: random.Random) -> Schema:
    value = draws.choice(["v1", 7, None, [1, "a"], {"a": {"b": 1}}, "größer", True])
    return _object(draws, {"version": {"const": value}, "value": _leaf(draws)})


def bounded_arrays(draws: random.Random) -> Schema:
    low = draws.randrange(0, 3)
    items = {"type": "array", "items": _leaf(draws), "minItems": low, "maxItems": low + 3}
    return _object(draws, {draws.choice(_NAMES): items})


def tuples(draws: random.Random) -> Schema:
    items = [_leaf(draws) for _ in range(draws.randrange(1, 4))]
    return {
        "type": "array", "prefixItems": items, "items": False, "minItems": len(items)
    }  # fmt: skip


def arrays_of_objects(draws: random.Random) -> Schema:
    item = flat_objects(draws)
    return {"type": "array", "items": item, "minItems": 1, "maxItems": draws.randrange(1, 4)}


def any_of(draws: random.Random) -> Schema:
    cases = [_leaf(draws), flat_objects(draws), {"type": "null"}]
    return _object(draws, {"value": {"anyOf": draws.sample(cases, 2)}})


def one_of_kinds(draws: random.Random) -> Schema:
    cases = [
        {
            "type": "object",
            "properties": {"kind": {"const": word}, "value": _leaf(draws)},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for word in draws.sample(_WORDS, draws.randrange(2, 4))
    ]
    return {"oneOf": cases}


def all_of(draws: random.Random) -> Schema:
    low = draws.randrange(0, 40)
    return _object(
        draws,
        {
            "count": {
                "allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 50}],
            },
            "note": {"allOf": [{"type": "string"}, {"maxLength": draws.randrange(4, 12)}]},
        },
    )


def references(draws: random.Random) -> Schema:
    names = _names(draws, 3)
    made = _object(draws, {name: {"$ref": "#/$defs/part"} for name in names}, optional=1)
    return {**made, "$defs": {"part": flat_objects(draws)}}


def recursive_references(draws: random.Random) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": _leaf(draws),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def patterns(draws: random.Random) -> Schema:
    pattern = draws.choice(
        [
            r"^[A-Z]{2}-\d{4}$",
            r"^(red|green|blue)\d{0,3}$",
            r"^[a-z]+(-[a-z]+){1,2}$",
            r"^\+?[0-9 ]{6,12}$",
            r"^v\d+\.\d+\.\d+$",
            r"^[äöü]{1,4}$",
        ]
    )
    return _object(draws, {draws.choice(_NAMES): {"type": "string", "pattern": pattern}})


def formats(draws: random.Random) -> Schema:
    known = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "duration"]
    return _object(
        draws,
        {name: {"type": "string", "format": draws.choice(known)} for name in _names(draws, 2)},
    )


def bounded_numbers(draws: random.Random) -> Schema:
    low = draws.randrange(-1000, 1000)
    return _object(
        draws,
        {
            "a": {"type": "integer", "minimum": low, "exclusiveMaximum": low + 700},
            "b": {"type": "number", "exclusiveMinimum": low / 8, "maximum": low / 8 + 3},
            "c": {"type": "integer", "multipleOf": draws.choice([2, 5, 10])},
        },
    )


def maps(draws: random.Random) -> Schema:
    made: Schema = {"type": "object", "additionalProperties": _leaf(draws)}
    if draws.random() < 0.5:
        made["patternProperties"] = {"^x_[a-z]{1,6}$": {"type": "integer"}}
    return made


def optional_members(draws: random.Random) -> Schema:
    members = {name: _leaf(draws) for name in _names(draws, 6)}
    return _object(draws, members, optional=5)


def unicode_values(draws: random.Random) -> Schema:
    words = ["größer", "名前", "Ж", "🙂", 'a"b', "back\\slash", "tab\tnew\nline"]
    return _object(draws, {name: {"enum": draws.sample(words, 2)} for name in ("übung", "名前")})


def nullable_trees(draws: random.Random) -> Schema:
    inner = flat_objects(draws)
    return _object(draws, {"tree": {"anyOf": [inner, {"type": "null"}]}, "size": _leaf(draws)})


def free_values(draws: random.Random) -> Schema:
    return _object(
        draws, {"note": {"type": "string"}, "list": {"type": "array", "items": _leaf(draws)}}
    )


def refused_keywords(draws: random.Random) -> Schema:
    keyword: Schema = draws.choice(
        [
            {"not": {"type": "string"}},
            {"uniqueItems": True, "type": "array"},
            {"if": {"type": "string"}, "then": {"maxLength": 3}},
            {"propertyNames": {"pattern": "^a"}},
            {"contains": {"type": "integer"}},
            {"format": "json-pointer", "type": "string"},
        ]
    )
    return _object(draws, {draws.choice(_NAMES): keyword})


FAMILIES: tuple[Family, ...] = (
    *(flat_objects, nested_objects, enums, constants, bounded_arrays, tuples, arrays_of_objects),
    *(any_of, one_of_kinds, all_of, references, recursive_references, patterns, formats),
    *(bounded_numbers, maps, optional_members, unicode_values, nullable_trees, free_values),
    refused_keywords,
)

UNBOUNDED_FAMILIES = (recursive_references, maps, free_values)


def all_schemas(seed: int = 1) -> list[tuple[str, Schema]]:
    """Return each schema with its family's name: the same for the same seed."""
    draws = random.Random(seed)
    return [
        (family.__name__, family(draws))
        for family in FAMILIES
        for _ in range(UNBOUNDED if family in UNBOUNDED_FAMILIES else EACH)
    ]
