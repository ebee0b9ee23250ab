"""The path of a fault in a schema: found from what the library says of it."""

from __future__ import annotations

import pytest

from baton.models.embedded import embedded_model
from baton.router.grammars.schema_fault import path_of_fault
from baton.runtime.errors import InvalidRequest
from baton.runtime.grammar.grammar_text import json_schema_grammar
from baton.runtime.grammar.matcher import compile_grammar
from baton.runtime.grammar.vocabulary import Vocabulary, read_vocabulary
from tests.support.json_values import JsonObject


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return read_vocabulary(embedded_model() / "tokenizer.json", 4096, [1])


@pytest.mark.parametrize(
    ("faulty", "keyword"),
    [
        ({"type": "strin"}, "type"),
        ({"type": ["string", "strin"]}, "type"),
        ({"type": 5}, "type"),
        ({"type": "string", "format": "nope"}, "format"),
        ({"type": "string", "pattern": "b(a"}, "pattern"),
        ({"type": "string", "pattern": "it's(" + "a" * 200}, "pattern"),
        ({"patternProperties": {"(a": {}}}, "patternProperties.(a"),
        ({"$ref": "#/$defs/x"}, "$ref"),
        ({"type": "integer", "minimum": "x"}, "minimum"),
        ({"type": "array", "minItems": -1}, "minItems"),
        ({"enum": 5}, "enum"),
        ({"anyOf": {}}, "anyOf"),
    ],
)
def test_fault_is_found_behind_valid_keywords(
    vocabulary: Vocabulary, faulty: JsonObject, keyword: str
) -> None:
    valid = {"type": "string", "pattern": "a+", "minLength": 1}
    schema = {"properties": {"valid": valid, "list": {"items": faulty}}}
    with pytest.raises(InvalidRequest) as refused:
        compile_grammar(json_schema_grammar(schema), vocabulary)
    assert path_of_fault(schema, str(refused.value)) == f"properties.list.items.{keyword}"


def test_error_that_names_no_keyword_has_no_path() -> None:
    assert path_of_fault({"multipleOf": 0}, "invalid multiple of") is None
    assert path_of_fault({"type": "string"}, "Invalid type: strin") is None
