"""Masks against pure references: all prefixes of finite languages, and random walks by schemas."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from baton.runtime.errors import InvalidRequest
from baton.runtime.grammar.grammar_text import (
    choice_grammar,
    ebnf_grammar,
    json_schema_grammar,
    prepared_schema,
    regex_grammar,
)
from baton.runtime.grammar.matcher import MAX_GRAMMAR_BYTES, compile_grammar
from tests.support.grammar_scene import (
    END,
    TOKENS,
    admitted,
    small_vocabulary,
    text_of,
    tokens_of,
)
from tests.support.json_values import JsonObject

VOCABULARY = small_vocabulary()
CHOICES = ["yes", "yesterday", "no", "éa", "ab", "abc", "abcab"]
SCHEMAS: list[JsonObject] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", 1, None, True]}, "minItems": 1, "maxItems": 3},
    {"type": "string", "pattern": "^[ab]{1,4}$"},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 5}]},
    {"type": "number", "minimum": -3, "maximum": 12},
    {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    },
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
]


def reference(prefix: bytes) -> set[int]:
    """Return the tokens after which `prefix` still begins one of the choices."""
    texts = [choice.encode() for choice in CHOICES]
    plain = range(256 + 11)
    found = {t for t in plain if any(text.startswith(prefix + TOKENS[t]) for text in texts)}
    return found | ({END} if prefix in texts else set())


def test_masks_lead_to_all_choices_and_nowhere_else() -> None:
    compiled = compile_grammar(choice_grammar(CHOICES), VOCABULARY)
    states: list[tuple[int, ...]] = [()]
    reached = set()
    for state in states:
        matcher = compiled.matcher()
        assert matcher.consume(state) == len(state)
        prefix = b"".join(TOKENS[token] for token in state)
        found = admitted(matcher.bitmask())
        assert found and found <= reference(prefix), prefix
        consumed = {t for t in range(len(TOKENS)) if matcher.admitted([t])}
        assert consumed - {END} == reference(prefix) - {END}
        states += [(*state, token) for token in found - {END}]
        if END in found:
            reached.add(prefix.decode())
    assert reached == set(CHOICES)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_each_walk_through_the_masks_ends_in_a_valid_text(schema: JsonObject) -> None:
    compiled = compile_grammar(json_schema_grammar(schema), VOCABULARY)
    draws = random.Random(7)
    ended = 0
    for _ in range(30):
        matcher, output = compiled.matcher(), []
        while len(output) < 80:
            allowed = admitted(matcher.bitmask())
            token = END if END in allowed else draws.choice(sorted(allowed))
            assert token == END or matcher.consume([token]) == 1
            if token == END:
                jsonschema.validate(json.loads(text_of(output)), schema)
                ended += 1
                break
            output.append(token)
    assert ended > 5


def test_a_mask_admits_only_tokens_that_are_consumed() -> None:
    compiled = compile_grammar(json_schema_grammar(SCHEMAS[0]), VOCABULARY)
    for text in ("", '{"', '{"a', '{"a":', '{"a":-', '{"a":12', '{"a":1}'):
        matcher = compiled.matcher()
        matcher.consume(tokens_of(text))
        found = admitted(matcher.bitmask())
        consumed = {t for t in range(len(TOKENS)) if matcher.admitted([t])}
        assert found and found - {END} <= consumed, text


def test_rollback_restores_the_mask() -> None:
    matcher = compile_grammar(json_schema_grammar(SCHEMAS[0]), VOCABULARY).matcher()
    matcher.consume(tokens_of('{"a'))
    before = matcher.bitmask()
    assert matcher.consume(tokens_of('":12}')) == 5 and matcher.exhausted
    matcher.rollback(5)
    assert matcher.bitmask() == before and not matcher.exhausted


def test_a_token_outside_the_mask_is_not_consumed() -> None:
    matcher = compile_grammar(regex_grammar("a+b"), VOCABULARY).matcher()
    assert matcher.consume(tokens_of("aacb")) == 2
    assert not matcher.error and matcher.consume(tokens_of("b")) == 1 and matcher.complete


@pytest.mark.parametrize(
    "text",
    [
        regex_grammar("(a"),
        regex_grammar("a(?=b)"),
        ebnf_grammar("start: missing"),
        json_schema_grammar({"not": {}}),
        json_schema_grammar({"enum": []}),
        "x" * (MAX_GRAMMAR_BYTES + 1),
        "no grammar",
    ],
)
def test_a_bad_grammar_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compile_grammar(text, VOCABULARY)
    assert 5 < len(str(refused.value)) < 400 and "\n" not in str(refused.value)


def test_a_lark_error_names_its_position() -> None:
    with pytest.raises(InvalidRequest, match=r"1\(8\).*missing"):
        compile_grammar(ebnf_grammar("start: missing"), VOCABULARY)


def test_a_pattern_s_error_names_the_character() -> None:
    with pytest.raises(InvalidRequest, match=r"'ab\(a' at character 3: unclosed group$"):
        compile_grammar(regex_grammar("ab(a"), VOCABULARY)


def test_a_missing_rule_of_ebnf_is_refused_with_its_line() -> None:
    with pytest.raises(InvalidRequest, match="'missing' not found at line 3"):
        ebnf_grammar('root ::= "a" b\nb ::=\n  missing')


def test_ebnf_with_defining_signs_is_read() -> None:
    compiled = compile_grammar(ebnf_grammar('root ::= "ab" | "yes" root'), VOCABULARY)
    assert compiled.matcher().consume(tokens_of("yesyesab")) == 8


def test_broken_ebnf_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="EBNF"):
        ebnf_grammar("root ::= ( [")


def test_options_for_the_library_are_taken_out_of_a_schema() -> None:
    given = {"type": "integer", "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    assert "x-guidance" not in prepared_schema(given)
    matcher = compile_grammar(json_schema_grammar({**given, "minimum": 3}), VOCABULARY).matcher()
    assert matcher.admitted(tokens_of(" ")) == 0


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"properties": {"a": {}}}, True),
        ({"properties": {"a": {}}, "additionalProperties": True}, False),
        ({"properties": {"a": {}}, "patternProperties": {"b": {}}}, False),
        ({"properties": {}}, False),
        ({"properties": {"a": {"allOf": [{}]}}}, False),
        ({"properties": {"properties": {"type": "string"}}}, True),
    ],
)
def test_an_object_that_names_its_members_has_no_others(schema: JsonObject, closed: bool) -> None:
    made = prepared_schema(schema)
    assert (made.get("additionalProperties") is False) == closed
    assert made["properties"] == schema["properties"]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, "9007199254740991", "9007199254740992"),
        ({"type": "integer", "minimum": 0}, "9007199254740991", "-1"),
        ({"type": "integer", "maximum": 1 << 60}, "1152921504606846976", "-9007199254740992"),
        ({"type": ["integer", "null"]}, "null", "99999999999999999"),
        ({"type": "number", "minimum": 0, "maximum": 9}, "1.123456789", "1.1234567891"),
        ({"type": "number", "minimum": 0, "maximum": 1e-6}, "0.0000000000000001", "1"),
        ({"type": "number"}, "1e-19", "1.e"),
        ({"enum": [1 << 60]}, str(1 << 60), "1"),
    ],
)
def test_digits_have_an_end(schema: JsonObject, right: str, wrong: str) -> None:
    compiled = compile_grammar(json_schema_grammar(schema), VOCABULARY)
    for text, whole in ((right, True), (wrong, False)):
        matcher = compiled.matcher()
        taken = matcher.consume(tokens_of(text))
        assert (taken == len(text) and matcher.complete) == whole, text


def test_a_number_beyond_64_bits_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        json_schema_grammar({"const": 1 << 70})


@pytest.mark.parametrize("limit", [None, 40])
def test_a_format_has_a_greatest_length(limit: int | None) -> None:
    bound = {} if limit is None else {"maxLength": limit}
    schema = {"type": "string", "format": "date-time", **bound}
    compiled = compile_grammar(json_schema_grammar(schema), VOCABULARY)
    start = '"2024-01-02T03:04:05.'
    digits = (limit or 35) - len(start[1:]) - 1
    for count, whole in ((digits, True), (digits + 1, False)):
        text = start + "1" * count + 'Z"'
        matcher = compiled.matcher()
        assert (matcher.consume(tokens_of(text)) == len(text)) == whole
