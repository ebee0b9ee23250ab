"""Grammars of calls in each form: what they admit is read back as a call that is valid, and what
the schema forbids is not admitted."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import pytest
import tokenizers

from baton.router.grammars.constraint import MAX_CONSTRAINT_BYTES
from baton.router.grammars.lark_text import GrammarTool
from baton.router.grammars.tool_grammar import answer_or_calls, required_calls, strict_calls
from baton.router.text.call_form import CallableTools
from baton.router.text.call_forms import FORMS
from baton.router.text.tool_calls import ToolCallParser
from baton.runtime.errors import InvalidRequest
from baton.runtime.grammar.grammar_text import lark_grammar
from baton.runtime.grammar.matcher import compile_grammar
from baton.runtime.grammar.vocabulary import Vocabulary, read_vocabulary
from tests.support.json_values import Json, JsonObject
from tests.support.machine_speed import slowness

SCHEMA: JsonObject = {
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
BAD: list[JsonObject] = [
    {"city": "Bonn", "n": -1},
    {"city": "Bonn", "n": "three"},
    {"city": "far too long", "n": 1},
    {"city": "Bonn"},
    {"city": "Bonn", "n": 1, "unit": "K"},
]


def written(form: str, arguments: JsonObject) -> str:
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

    def read(self, text: str) -> list[tuple[str, Json]]:
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
        ({"type": "string", "pattern": r"^a\\/b$"}, ["a\\/b"], ["a/b", "a\\/bc"]),
        ({"type": "string", "pattern": r"^a\/b/$"}, ["a/b/"], ["a\\/b/", "a/b"]),
        ({"type": "string", "pattern": r"^a\\$"}, ["a\\"], ["a$", "a\\b"]),
        ({"type": "string", "pattern": r"^a\$"}, ["a$", "a$b"], ["a", "a\\"]),
        ({"type": "string", "pattern": "cat|dog"}, ["a cat.", "dog", "the dog"], ["do", "ca"]),
        ({"type": "string", "pattern": "^cat|dog$"}, ["cats", "a dog"], ["a cat", "dogs"]),
        ({"type": "string", "pattern": "^(a|b)[|)]$"}, ["a|", "b)"], ["a", "b", "c|"]),
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
    schema: JsonObject,
    good: list[Json],
    bad: list[Json],
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
        ({"properties": {"a": {"type": ["string", "text"]}}}, "'a': there is no type 'text'"),
        ({"properties": {"a": {"type": "string", "format": ["date"]}}}, "'a': format"),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, "reference '#' leads"),
    ],
)
def test_schema_that_markup_cannot_follow_is_refused(schema: JsonObject, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        required_calls(FORMS["glm"], [GrammarTool("f", schema)], True, lambda text: None)
    assert refused.value.field == "tools"


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize("marked", [True, False])
def test_free_tool_takes_any_parameters_in_markup(
    model_folder: Path, tmp_path: Path, name: str, marked: bool
) -> None:
    """Its schema was refused, or followed, only because another tool was strict."""
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    model = Model(tmp_path, name, marked)
    schema = {"type": "object", "anyOf": [{"required": ["a"]}], "minProperties": 1}
    tools = [GrammarTool("g", SCHEMA), GrammarTool("f", schema, free=True)]
    lark = strict_calls(model.form, tools, True, model.token)
    for arguments in ({}, {"a": "x"}, {"city": "Bonn", "any thing": [1, {"b": None}], "n": -1}):
        text = written(name, arguments)
        assert model.admits(lark, f"Well. {text}"), arguments
    assert not model.admits(lark, written(name, {"city": "Bonn", "n": -1}).replace("f", "g", 1))
    assert not model.admits(lark, written(name, {"a": "x</parameter>y</arg_value>z"}))


def test_root_may_have_an_id_and_the_name_of_its_dialect() -> None:
    names = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "f"}
    tool = GrammarTool("f", {"type": "object", **names, "$comment": "x", "properties": {"a": {}}})
    assert "a" in required_calls(FORMS["glm"], [tool], True, lambda text: None)


def defined(value: JsonObject, count: int, own: bool) -> JsonObject:
    """Parameters that refer to one definition, or each to its own."""
    names = [f"d{number}" if own else "d" for number in range(count)]
    return {
        "type": "object",
        "properties": {f"p{at}": {"$ref": f"#/$defs/{name}"} for at, name in enumerate(names)},
        "$defs": dict.fromkeys(names, value),
    }


@pytest.mark.timed
@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "hermes", "gpt_oss"])
@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        (defined({"type": "integer"}, 850, True), True),
        (defined({"enum": [f"value {n}" for n in range(300)]}, 300, False), True),
        (defined({"type": "array", "items": {"$ref": "#/$defs/d"}}, 850, False), True),
        (
            {
                "type": "object",
                "properties": {f"p{n}": {"type": "integer"} for n in range(300)},
                "$defs": {f"d{n}": {"type": "integer", "title": "x" * 99} for n in range(200)},
            },
            False,
        ),
    ],
    ids=["own definitions", "enumeration", "recursive", "unused definitions"],
)
def test_rules_of_large_schemas_take_little_time(
    name: str, schema: JsonObject, refused: bool
) -> None:
    """Each parameter had all definitions beside it: a body of 28 KB made a grammar of 7 MB, while
    the event loop waited."""
    began_s = time.process_time()
    try:
        made = required_calls(FORMS[name], [GrammarTool("f", schema)], True, lambda text: None)
    except InvalidRequest as error:
        assert error.field == "tools" and "tools: f: the grammar" in str(error)
        assert refused
    else:
        assert len(made) <= MAX_CONSTRAINT_BYTES
        assert not refused or name in ("hermes", "gpt_oss")  # whose rules have the schema once
    assert time.process_time() - began_s < 0.2 * slowness()


@pytest.mark.parametrize("name", ["glm", "hermes"])
def test_long_names_around_many_objects_take_no_memory(name: str) -> None:
    """Each object had its path, which has the names of all objects around it."""
    schema = {"type": "object", "properties": {"a": {"x" * 200_000: [{}] * 2000}}}
    tracemalloc.start()
    with pytest.raises(InvalidRequest):
        required_calls(FORMS[name], [GrammarTool("f", schema)], True, lambda text: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
