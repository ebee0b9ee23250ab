"""Grammars of calls in each form: what they admit is read back as a call that is valid, and what
the schema forbids is not admitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from baton.router.grammars.lark_text import GrammarTool
from baton.router.grammars.tool_grammar import answer_or_calls, required_calls, strict_calls
from baton.router.text.call_form import CallableTools
from baton.router.text.call_forms import FORMS
from baton.router.text.tool_calls import ToolCallParser
from baton.runtime.errors import InvalidRequest
from baton.runtime.grammar.grammar_text import lark_grammar
from baton.runtime.grammar.matcher import compile_grammar
from baton.runtime.grammar.vocabulary import Vocabulary, read_vocabulary

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "n": {"$ref": "#/$defs/n"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "n"],
    "$defs": {"n": {"type": "integer", "minimum": 0}},
}
TOOLS = [GrammarTool("f", SCHEMA), GrammarTool("g", None)]
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
WRITTEN = {
    "deepseek_v3": "{b}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{json}\n```"
    "<｜tool▁call▁end｜>{e}",
    "deepseek_v31": "{b}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{json}<｜tool▁call▁end｜>{e}",
    "gpt_oss": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{json}",
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {json}}}\n</tool_call>',
    "llama": '{{"name": "f", "parameters": {json}}}',
    "mistral": '[TOOL_CALLS][{{"name": "f", "arguments": {json}}}]',
    "qwen3_coder": "<tool_call>\n<function=f>\n{qwen}</function>\n</tool_call>",
    "glm": "<tool_call>f\n{glm}</tool_call>",
}
GOOD = {"city": "Zürich <", "n": 3, "note": None, "unit": "C"}
BAD: list[dict[str, Any]] = [
    {"city": "Bonn", "n": -1},
    {"city": "Bonn", "n": "three"},
    {"city": "far too long", "n": 1},
    {"city": "Bonn"},
    {"city": "Bonn", "n": 1, "unit": "K"},
]


def written(form: str, arguments: dict[str, Any]) -> str:
    """A call as a model writes it."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    return WRITTEN[form].format(
        b=BEGIN,
        e=END,
        json=json.dumps(arguments, ensure_ascii=False),
        qwen="".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items()),
        glm="".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in texts.items()
        ),
    )


class Model:
    """A tokenizer with the markers of a form as tokens, or without."""

    def __init__(self, folder: Path, name: str, marked: bool) -> None:
        self.form = FORMS[name]
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if marked:
            self._tokenizer.add_special_tokens(list(self.form.markers))
        path = folder / f"{name}-{marked}.json"
        self._tokenizer.save(str(path))
        self.vocabulary: Vocabulary = read_vocabulary(path, self._tokenizer.get_vocab_size(), [1])

    def token(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def admits(self, lark: str, text: str) -> bool:
        matcher = compile_grammar(lark_grammar(lark), self.vocabulary).matcher()
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.consume(tokens) == len(tokens) and matcher.complete

    def read(self, text: str) -> list[tuple[str, Any]]:
        parser = ToolCallParser(
            CallableTools(self.form, frozenset({"f", "g"}), True, {"f": SCHEMA, "g": {}})
        )
        calls = [*parser.push(text)[1], *parser.flush()[1]]
        return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.fixture(
    params=[(name, marked) for name in sorted(WRITTEN) for marked in (True, False)],
    ids=lambda each: f"{each[0]}-{'tokens' if each[1] else 'text'}",
)
def model(request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path) -> Model:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    return Model(tmp_path, *request.param)


def name_of(model: Model) -> str:
    return next(name for name, form in FORMS.items() if form is model.form)


def test_forced_call_follows_its_schema(model: Model) -> None:
    name = name_of(model)
    lark = required_calls(model.form, TOOLS, True, model.token)
    text = written(name, GOOD)
    assert model.admits(lark, text), lark
    assert model.read(text) == [("f", GOOD)]
    assert not model.admits(lark, "hello")
    for bad in BAD:
        assert not model.admits(lark, written(name, bad)), bad


def test_call_beside_text_follows_its_schema_when_strict(model: Model) -> None:
    name = name_of(model)
    lark = strict_calls(model.form, [TOOLS[0], GrammarTool("g", {}, free=True)], True, model.token)
    answer = "<|channel|>final<|message|>" if name == "gpt_oss" else ""
    assert model.admits(lark, f"{answer}It is < 5 [x].")
    assert model.admits(lark, written(name, GOOD))
    if name not in ("llama", "gpt_oss"):
        assert model.admits(lark, f"Well. {written(name, GOOD)}")
    for bad in BAD:
        assert not model.admits(lark, written(name, bad)), bad
        assert not model.admits(lark, f"{answer}Well. {written(name, bad)}") or name == "llama"


def test_answer_of_a_schema_may_be_a_call(model: Model) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    lark = answer_or_calls(model.form, TOOLS, True, model.token, schema)
    name = name_of(model)
    answer = "<|channel|>final<|message|>" if name == "gpt_oss" else ""
    assert model.admits(lark, answer + '{"a":1}') and model.admits(lark, written(name, GOOD))
    assert not model.admits(lark, answer + '{"a":"b"}')


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", ""]),
        ({"type": "string", "pattern": "b"}, ["abc"], ["ac"]),
        ({"type": "string", "format": "date"}, ["2026-11-24"], ["2026-13-01", "today"]),
        ({"type": "string", "minLength": 2}, ["ab", "a\nb"], ["a"]),
        ({"type": "string", "const": "x / y"}, ["x / y"], ["x"]),
        ({"type": "string"}, ["null", "5", "", '"a"', "two\n\nlines\n"], []),
        ({"type": ["string", "integer"]}, ["a", 5, "5 a"], []),
        ({"type": "boolean"}, [True], ["yes"]),
        ({"type": "array", "items": {"type": "integer"}}, [[1, 2]], [["a"], "a"]),
        ({"type": ["array", "null"], "items": {"type": "integer"}}, [[1, 2], None], [["a"], "a"]),
        ({"type": "object", "properties": {"k": {}}}, [{}, {"k": [{"l": "m"}]}], [{"l": 1}, "{"]),
        (
            {"type": ["string", "array"], "items": {"type": "integer"}},
            ["ab", "a [b", [1, 2], []],
            [["a"], "[see", " [1]"],
        ),
        (
            {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/k"}, {"type": "null"}]},
            ["x", "5", None, {"k": "y"}],
            [{"z": 1}, {}, "{"],
        ),
        ({"type": ["string", "object"], "maxLength": 2}, ["ab", {"a": [1, {"b": "c"}]}], ["abc"]),
        ({"enum": ["a", [1], None]}, ["a", [1], None], ["b", [2]]),
        ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
        ({"description": "anything"}, ["a", "b c", [1]], []),
        ({"allOf": [{"$ref": "#/$defs/n"}], "description": "a number"}, [4], ["a"]),
    ],
)
def test_value_follows_its_schema(
    model_folder: Path,
    tmp_path: Path,
    name: str,
    marked: bool,
    schema: dict[str, Any],
    good: list[Any],
    bad: list[Any],
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    model = Model(tmp_path, name, marked)
    root = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {
            "n": {"type": "integer"},
            "k": {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]},
        },
    }
    lark = required_calls(model.form, [GrammarTool("f", root)], False, model.token)
    tools = CallableTools(model.form, frozenset("f"), True, {"f": root})
    for value in good:
        text = written(name, {"a": value})
        assert model.admits(lark, text), value
        parser = ToolCallParser(tools)
        (call,) = parser.push(text)[1]
        assert json.loads(call.arguments) == {"a": value}
    own = "</parameter>" if name == "qwen3_coder" else "</arg_value>"
    for value in [*bad, f"a{own}b", own]:
        assert not model.admits(lark, written(name, {"a": value})), value


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_strings_in_a_list_may_have_marks(model_folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    model = Model(tmp_path, name, False)
    root = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    lark = required_calls(model.form, [GrammarTool("f", root)], False, model.token)
    value = ["</parameter>", {"</arg_value>": "</tool_call>"}]
    text = written(name, {"a": value})
    assert model.admits(lark, text)
    assert model.read(text) == [("f", {"a": value})]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "string", "format": "regex"}}}, "'a': format 'regex'"),
        ({"properties": {"a": {"minLength": 3}}}, "'a', without a type, has 'minLength'"),
        ({"properties": {"a": {"type": "string", "contentEncoding": "x"}}}, "'contentEncoding'"),
        ({"anyOf": [{"required": ["a"]}]}, "the schema has 'anyOf'"),
        ({"properties": {"<a>": {}}}, "'<a>' cannot be written"),
    ],
)
def test_schema_that_markup_cannot_follow_is_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        required_calls(FORMS["glm"], [GrammarTool("f", schema)], True, lambda text: None)
    assert refused.value.field == "tools"
