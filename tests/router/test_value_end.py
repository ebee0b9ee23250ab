"""Values in markup end at their mark, and not within a string of JSON, however the text is cut."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.text.call_form import CallableTools
from baton.router.text.call_forms import FORMS
from baton.router.text.tool_calls import ParsedCall, ToolCallParser
from baton.router.text.value_end import ValueEnd
from tests.support.json_values import Json, JsonObject

MARK = "</v>"
SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "rows": {"type": "array"},
        "map": {"type": "object"},
        "any": {"type": ["string", "array", "object"]},
        "text": {"type": "string"},
    },
}
WAYS = {
    "qwen3_coder": ("<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>"),
    "glm": ("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
}
OPENINGS = {"qwen3_coder": "<tool_call>\n<function=f>\n", "glm": "<tool_call>f\n"}
BOTH = "</parameter></arg_value>"
VALUES: list[JsonObject] = [
    {"rows": [], "map": {}},
    {"rows": [1, [2.5, None], {"a": "b"}], "text": "[1]"},
    {"rows": [BOTH, f'"{BOTH}', f"\\{BOTH}\\"], "map": {BOTH: {"k": [f"\n{BOTH}\n"]}}},
    {"any": ["x"], "text": "{}"},
    {"any": {"k": "é " + BOTH}, "text": '{"open'},
    {"any": "[no list", "text": '["a'},
    {"any": '{"a": "b', "rows": ["c"]},
    {"any": '["a\\', "rows": ["c\\"]},
]


def written(form: str, arguments: JsonObject) -> str:
    one, end = WAYS[form]
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    return OPENINGS[form] + "".join(one.format(*each) for each in texts.items()) + end


def read(form: str, pieces: list[str]) -> tuple[str, list[Json]]:
    tools = CallableTools(FORMS[form], frozenset({"f"}), True, {"f": SCHEMA})
    parser, content, calls = ToolCallParser(tools), "", list[ParsedCall]()
    for text, found in [*(parser.push(piece) for piece in pieces), parser.flush()]:
        content += text
        calls += found
    return content, [json.loads(call.arguments) for call in calls]


@pytest.mark.parametrize("arguments", VALUES)
@pytest.mark.parametrize("form", WAYS)
def test_lists_and_objects_are_read_back(form: str, arguments: JsonObject) -> None:
    text = written(form, arguments)
    assert read(form, [text + text]) == ("", [arguments] * 2)
    assert read(form, list(text)) == ("", [arguments])


@pytest.mark.parametrize("form", WAYS)
def test_values_without_line_breaks_are_read_back(form: str) -> None:
    arguments = {"rows": [BOTH], "any": '["no list', "text": 'a "quote"', "map": {"a": 1}}
    assert read(form, list(written(form, arguments).replace("\n", ""))) == ("", [arguments])


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("a" + MARK, "a"),
        (' ["' + MARK + '"]' + MARK, ' ["' + MARK + '"]'),
        ('["' + MARK, None),
        ('["' + MARK + "\n", '["'),
        ('["' + MARK + '"' + MARK, '["'),
        ("[\\" + MARK, "[\\"),
        ('["\\' + MARK, None),
        ('{"a": "' + MARK + '\\"' + MARK + '"}' + MARK, '{"a": "' + MARK + '\\"' + MARK + '"}'),
        ("[" * 5000 + '"' + MARK + '"' + MARK, "[" * 5000 + '"'),
        ("no mark", None),
    ],
)
def test_end_is_the_first_mark_outside_of_json_strings(text: str, end: str | None) -> None:
    assert ValueEnd(MARK, 0).find(text, False) == (None if end is None else len(end))
    first = text.find(MARK)
    whole = None if first < 0 else first if end is None else len(end)
    assert ValueEnd(MARK, 0).find(text, True) == whole


PIECES = st.sampled_from(['"', "\\", "[", "]", "{", "a", ",", "\n", " ", MARK, "</", "v>"])


@given(st.lists(PIECES, max_size=30), st.booleans())
def test_cuts_of_the_text_change_nothing(pieces: list[str], cut: bool) -> None:
    """`cut`: the held text loses what was read before the value."""
    text = "".join(pieces)
    whole, growing = ValueEnd(MARK, 0).find(text, True), ValueEnd(MARK, 3 if cut else 0)
    if cut:
        growing.find("abc" + text[:5], False)
        growing.moved(3)
    found = None
    for length in range(len(text) + 1):
        found = growing.find(text[:length], False)
        if found is not None:
            break
    assert (growing.find(text, True) if found is None else found) == whole


@pytest.mark.parametrize("piece", ['["</v>', '{"\\"</v>', '["', "</v", '{"\\', "[</v>"])
def test_no_text_is_read_again_and_again(piece: str) -> None:
    """Limits are fifty times what it takes."""
    text, started = "[" + piece * 20_000, time.process_time()
    end, at = ValueEnd(MARK, 0), 0
    for length in range(0, len(text), 100):
        found = end.find(text[:length], False)
        if found is not None:
            at = found + len(MARK)
            end = ValueEnd(MARK, at)
    assert time.process_time() - started < 5
