"""Calls in the forms of DeepSeek, gpt-oss, Qwen3-Coder and GLM, and the types of untyped values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.templates.chat_template import ChatTemplate
from baton.router.templates.tool_support import support_of
from baton.router.text.call_form import CallableTools
from baton.router.text.call_forms import FORMS
from baton.router.text.markup_value import MAX_STEPS, json_value
from baton.router.text.tool_calls import ParsedCall, ToolCallParser
from tests.support.json_values import JsonObject

FAMILIES = Path(__file__).parent / "families"
PARAMETERS = {
    "f": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array"},
            "n": {"$ref": "#/$defs/n"},
        },
        "$defs": {"n": {"type": "integer"}},
    }
}
ARGUMENTS = {"city": "Zürich", "days": [1, 2.5], "n": 3}
JSON = '{"city": "Zürich", "days": [1, 2.5], "n": 3}'
NEW = ("deepseek_v3", "deepseek_v31", "gpt_oss", "qwen3_coder", "glm")
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
V31 = f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
HARMONY = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{JSON}"
FUNCTION = (
    "<function=f>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n[1, 2.5]\n"
    "</parameter>\n<parameter=n>\n3\n</parameter>\n</function>"
)
QWEN = f"<tool_call>\n{FUNCTION}\n</tool_call>"
GLM = (
    "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>[1, 2.5]</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
WRITTEN = [("deepseek_v31", V31), ("gpt_oss", HARMONY), ("qwen3_coder", QWEN), ("glm", GLM)]
UNREADABLE = ('["\\ud83d"]', "[1e999]", "[" * 32 + "]" * 32)  # a client could not send them back
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def parsed(form: str, pieces: Sequence[str]) -> tuple[str, list[JsonObject]]:
    """The content, and the arguments of the calls of `f`."""
    parser = ToolCallParser(CallableTools(FORMS[form], frozenset({"f"}), True, PARAMETERS))
    content = ""
    calls: list[ParsedCall] = []
    for text, found in [*(parser.push(piece) for piece in pieces), parser.flush()]:
        content += text
        calls += found
    assert [call.index for call in calls] == list(range(len(calls)))
    assert {call.name for call in calls} <= {"f"}
    return content, [json.loads(call.arguments) for call in calls]


# (form, text, content, number of calls)
GOOD = [
    ("deepseek_v3", f"See.{BEGIN}{V3}{END}", "See.", 1),
    ("deepseek_v3", f"{BEGIN}{V3}\n{V3}{END}", "", 2),
    ("deepseek_v3", f"{V3}{V3}{END}after", "after", 2),
    ("deepseek_v3", f"{BEGIN}{V3.removesuffix('<｜tool▁call▁end｜>')}", "", 1),
    ("deepseek_v31", f"{BEGIN}{V31}{V31}{END}", "", 2),
    ("deepseek_v31", f"So\n\n{BEGIN}\n{V31}\n{END}\n", "So", 1),
    ("gpt_oss", f"{HARMONY}<|call|>", "", 1),
    ("gpt_oss", HARMONY, "", 1),  # <|call|> is an end token
    ("gpt_oss", f" to=functions.f<|channel|>commentary json<|message|>{JSON}<|call|>", "", 1),
    ("gpt_oss", f"<|start|>assistant to=functions.f<|channel|>analysis<|message|>{JSON}", "", 1),
    ("gpt_oss", f"I look.\n{HARMONY.replace(' <|constrain|>', '<|constrain|>')}", "I look.", 1),
    ("qwen3_coder", f"Let me see.\n\n{QWEN}\n{QWEN}\n", "Let me see.", 2),
    ("qwen3_coder", QWEN.replace("\n", ""), "", 1),
    ("qwen3_coder", QWEN.removesuffix("call>"), "", 1),
    ("qwen3_coder", f"{FUNCTION}\n</tool_call> so", "so", 1),
    ("glm", f"Let me see.\n{GLM}\n{GLM}", "Let me see.", 2),
    ("glm", GLM.replace("\n", ""), "", 1),
    ("glm", GLM.removesuffix("ool_call>"), "", 1),
]


@pytest.mark.parametrize(("form", "text", "content", "count"), GOOD)
def test_calls_are_found(form: str, text: str, content: str, count: int) -> None:
    assert parsed(form, [text]) == (content, [ARGUMENTS] * count)
    assert parsed(form, list(text)) == (content, [ARGUMENTS] * count)


NOT_CALLS = [
    ("deepseek_v3", BEGIN),
    ("deepseek_v3", f"{BEGIN}{END}"),
    ("deepseek_v3", f"{BEGIN}{V31}{END}"),
    ("deepseek_v3", f"{BEGIN}{V3.replace('f', 'g', 1)}{END}"),
    ("deepseek_v3", V3.replace("``` ", "`` ").replace("```<", "``<")),
    ("deepseek_v31", f"{BEGIN}{V3}{END}"),
    ("deepseek_v31", V31.replace("}", ",}")),
    ("deepseek_v31", V31[:-25]),
    ("deepseek_v31", V31.replace("call▁end", "calls▁end")),
    ("gpt_oss", HARMONY.replace("functions.f", "functions.unknown")),
    ("gpt_oss", HARMONY.replace("<|message|>", "")),
    ("gpt_oss", HARMONY[:-1]),
    ("gpt_oss", f"to=functions.{'f' * 300}"),
    ("gpt_oss", f"<|channel|>commentary to=python<|message|>{JSON}"),
    *((form, text.replace("[1, 2.5]", bad)) for form, text in WRITTEN for bad in UNREADABLE),
    ("qwen3_coder", "<tool_call>\n" + JSON + "\n</tool_call>"),
    ("qwen3_coder", QWEN.replace("=f>", "=unknown>")),
    ("qwen3_coder", QWEN.replace("days", "city")),
    ("qwen3_coder", QWEN.replace("=city", "=")),
    ("qwen3_coder", QWEN.replace("</function>", "and more")),
    ("qwen3_coder", QWEN[: QWEN.index("</function>")]),
    ("qwen3_coder", QWEN.replace("f>", "f " * 150 + ">", 1)),
    ("glm", "<tool_call>\n" + JSON + "\n</tool_call>"),
    ("glm", GLM.replace("f\n", "unknown\n", 1)),
    ("glm", GLM.replace("days", "city")),
    ("glm", GLM.replace("<arg_value>[", "[")),
    ("glm", GLM.removesuffix("</tool_call>")),  # an argument may still have followed
    ("glm", GLM.replace("<arg_value>[", " " * 300 + "<arg_value>[")),
]


@pytest.mark.parametrize(("form", "text"), NOT_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(form: str, text: str) -> None:
    assert parsed(form, [text]) == (text, [])
    assert parsed(form, list(text)) == (text, [])


MARKS = ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"]
MARKS += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", BEGIN, END, "<|call|>", "```"]
MARKS += ["function<｜tool▁sep｜>", "```json", "<｜tool▁call▁begin｜>", "to=functions.", "</"]
FRAGMENTS = [
    *MARKS,
    V3,
    V31,
    HARMONY,
    FUNCTION,
    QWEN,
    GLM,
    JSON,
    "f",
    ">",
    "{",
    '"',
    " ",
    "\n",
    "é",
]


@settings(max_examples=200, deadline=None)
@given(
    form=st.sampled_from(NEW),
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=10),
    cuts=st.lists(st.integers(0, 900), max_size=12),
)
def test_any_cut_gives_the_same(form: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = parsed(form, [text])
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert parsed(form, pieces) == whole == parsed(form, list(text))
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("deepseek_v3_1", "deepseek_v31"),
        ("glm4_5", "glm"),
        ("gpt_oss", "gpt_oss"),
        ("qwen3_coder", "qwen3_coder"),
        ("nemotron_3", "qwen3_coder"),
        ("qwen3", "hermes"),
    ],
)
def test_form_is_found_from_the_template(family: str, form: str) -> None:
    source = (FAMILIES / f"{family}.jinja").read_text(encoding="utf-8")
    support = support_of(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))
    assert support.form is FORMS[form]


def test_deepseek_v3_form_is_found_where_tools_are_printed() -> None:
    source = (FAMILIES / "deepseek_v3.jinja").read_text(encoding="utf-8")
    source = "{% if tools %}{{ tools | tojson }}{% endif %}" + source.replace("<think>\\n", "")
    support = support_of(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))
    assert support.form is FORMS["deepseek_v3"]


STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", STRING, "5"),
        ("5", INTEGER, 5),
        ("5.0", INTEGER, 5.0),
        ("5.5", INTEGER, "5.5"),
        ("5", {"type": "number"}, 5),
        ("five", INTEGER, "five"),
        ("True", {"type": "boolean"}, True),
        (" false ", {"type": "boolean"}, False),
        ("None", {"anyOf": [STRING, NULL]}, None),
        ("null", STRING, "null"),
        ("nothing", {"anyOf": [STRING, NULL]}, "nothing"),
        ("7", {"type": ["integer", "null"]}, 7),
        ("7", {"oneOf": [{"$ref": "#/$defs/text"}]}, "7"),
        ("[1]", {"type": "array"}, [1]),
        ('{"a": "b"}', {"$ref": "#/$defs/thing"}, {"a": "b"}),
        ('"quoted"', STRING, '"quoted"'),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"const": 1}, 1),
        ("1", {}, 1),
        ("one", {}, "one"),
        ("[1] and more", {"type": "array"}, "[1] and more"),
        ("NaN", {"type": "number"}, "NaN"),
        ("9" * 5000, INTEGER, "9" * 5000),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("1", {"$ref": "#/$defs/loop"}, 1),
        ("1", {"$ref": "#/somewhere/else"}, 1),
        ("a", {"anyOf": [STRING] * (MAX_STEPS + 1)}, "a"),
        (' two\nlines\t"é"', STRING, ' two\nlines\t"é"'),
    ],
)
def test_value_is_read_by_its_schema(text: str, schema: JsonObject, value: object) -> None:
    loop = {"$ref": "#/$defs/loop"}
    root = {
        "properties": {"a": schema},
        "$defs": {"text": STRING, "thing": {"type": "object"}, "loop": loop},
    }
    assert json.loads(json_value(text, "a", root)) == value
    assert type(json.loads(json_value(text, "a", root))) is type(value)
