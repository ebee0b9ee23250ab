"""Calls found in text: each form, whatever is no call, and any cut of the text the same."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.requests.openai_schema import FunctionCall
from baton.router.text import tool_calls
from baton.router.text.call_form import CallableTools
from baton.router.text.call_forms import FORMS
from baton.router.text.tool_calls import ParsedCall, ToolCallParser
from tests.support.machine_speed import slowness

NAMES = frozenset({"f", "get_weather", "a-b.c"})
ARGUMENTS = '{"city": "Zürich", "days": [1, 2.50], "note": "</tool_call> } \\" \\u00e9"}'
ONE = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
DEEP = '{"a": ' + "[" * 31 + "]" * 31 + "}"
BARE = f'{{"name": "f", "parameters": {ARGUMENTS}}}'


def parsed(
    form: str, pieces: Sequence[str], parallel: bool = True
) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(CallableTools(FORMS[form], NAMES, parallel))
    content = ""
    calls: list[ParsedCall] = []
    for text, found in [*(parser.push(piece) for piece in pieces), parser.flush()]:
        content += text
        calls += found
    assert [call.index for call in calls] == list(range(len(calls))) == list(range(parser.count))
    return content, [(call.name, call.arguments) for call in calls]


# (form, text, content, calls)
GOOD: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [("f", ARGUMENTS)]),
    ("hermes", f"<tool_call>{ONE}</tool_call>", "", [("f", ARGUMENTS)]),
    (
        "hermes",
        '<tool_call>{"arguments": {}, "name": "a-b.c"}</tool_call>',
        "",
        [("a-b.c", "{}")],
    ),
    (
        "hermes",
        f"Let me see.\n\n<tool_call>\n{ONE}\n</tool_call>\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"a": {"b": [{}]}}}\n</tool_call>\n',
        "Let me see.",
        [("f", ARGUMENTS), ("get_weather", '{"a": {"b": [{}]}}')],
    ),
    ("hermes", f"a <tool_call>{ONE}</tool_call> b c ", "ab c ", [("f", ARGUMENTS)]),
    ("hermes", f"<tool_call>\n{ONE}\n", "", [("f", ARGUMENTS)]),  # the end came first
    ("hermes", f"<tool_call>\n{ONE}\n</tool", "", [("f", ARGUMENTS)]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {DEEP}}}', "", [("f", DEEP)]),
    ("llama", BARE, "", [("f", ARGUMENTS)]),
    ("llama", f" \n{BARE} ; {ONE};\n{BARE}\n", "", [("f", ARGUMENTS)] * 3),
    ("llama", f"<|python_tag|>{BARE}", "", [("f", ARGUMENTS)]),
    ("llama", f"So: <|python_tag|> {BARE}", "So:", [("f", ARGUMENTS)]),
    (
        "llama",
        '{"type": "function", "name": "f", "parameters": {}} and more {"name"}',
        'and more {"name"}',
        [("f", "{}")],
    ),
    ("mistral", f"[TOOL_CALLS] [{ONE}]", "", [("f", ARGUMENTS)]),
    (
        "mistral",
        f'[TOOL_CALLS][{ONE} , {{"name": "get_weather", "arguments": {{}}, "id": "abcdefghi"}}]\n',
        "",
        [("f", ARGUMENTS), ("get_weather", "{}")],
    ),
    ("mistral", f"See.[TOOL_CALLS]{ONE}", "See.", [("f", ARGUMENTS)]),
    ("mistral", f"[TOOL_CALLS]f{ARGUMENTS}", "", [("f", ARGUMENTS)]),
    (
        "mistral",
        f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}[TOOL_CALLS]a-b.c[ARGS]{{}}",
        "",
        [("f", ARGUMENTS), ("a-b.c", "{}")],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), GOOD)
def test_calls_are_found(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(form, [text]) == (content, calls)
    assert parsed(form, list(text)) == (content, calls)
    for name, arguments in calls:
        FunctionCall.model_validate({"name": name.replace(".", "-"), "arguments": arguments})


def hermes(inner: str) -> str:
    return f"<tool_call>{inner}</tool_call>"


NOT_CALLS: list[tuple[str, str]] = [
    ("hermes", ""),
    ("hermes", "  plain < text <tool_ and <tool_call "),
    ("hermes", "<tool_call>"),
    ("hermes", ' x <tool_call>\n{"name": "f", "argu'),
    ("hermes", hermes('{"name": "unknown", "arguments": {}}')),
    ("hermes", hermes('{"name": 7, "arguments": {}}')),
    ("hermes", hermes('{"name": null, "arguments": {}}')),
    ("hermes", hermes('{"arguments": {}}')),
    ("hermes", hermes('{"name": "f"}')),
    ("hermes", hermes('{"name": "f", "arguments": []}')),
    ("hermes", hermes('{"name": "f", "arguments": "{}"}')),
    ("hermes", hermes('{"name": "f", "arguments": {}, "parameters": {}}')),
    ("hermes", hermes('{"name": "f", "arguments": {}, "why": "a reason"}')),
    ("hermes", hermes('{"name": "f", "name": "f", "arguments": {}}')),
    ("hermes", hermes('{"name": "f", "arguments": {"a": 1,}}')),
    ("hermes", hermes('{"name": "f", "arguments": {},}')),
    ("hermes", hermes('{"name": "f" "arguments": {}}')),
    ("hermes", hermes('{"name": "f", "arguments": {"a": NaN}}')),
    ("hermes", hermes('{"name": "f", "arguments": {"a": 01}}')),
    ("hermes", hermes('{"name": \'f\', "arguments": {}}')),
    ("hermes", hermes('{"name": "f", "arguments": {"a": "one\ntwo"}}')),
    ("hermes", hermes('{"name": "f", "arguments": {]}')),
    ("hermes", hermes('{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}")),
    ("hermes", hermes('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}")),
    ("hermes", hermes('{"name": "f", "arguments": {"a": ' + "[" * 32 + "]" * 32 + "}}")),
    ("hermes", hermes('{"name": "f", "arguments": {"a": "\\ud83d"}}')),
    ("hermes", hermes('{"name": "f", "arguments": {"a": 1e999}}')),
    ("hermes", hermes("{}")),
    ("hermes", hermes("f(1)")),
    ("hermes", hermes(f"[{ONE}]")),
    ("hermes", hermes("\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n")),
    ("hermes", f"<tool_call>{ONE}</tool_calls>"),
    ("hermes", f"<tool_call>{ONE} and more"),
    ("hermes", ONE),
    ("llama", " ; "),
    ("llama", f"Here: {BARE}"),
    ("llama", '{"name": "Anna", "parameters": {}}'),
    ("llama", '{"answer": [1, 2]} is the answer'),
    ("llama", '{"n\\u0061me": "f", "parameters": {}}'),
    ("llama", "{not JSON} <|python_tag|>"),
    ("llama", '<|python_tag|>f.call(a="b")'),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", f"[TOOL_CALLS] [{ONE}, {ONE}"),
    ("mistral", f"[TOOL_CALLS] [{ONE} {ONE}]"),
    ("mistral", f"[TOOL_CALLS] [{ONE},]"),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS]unknown{}"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{'a': 1}"),
    ("mistral", "[TOOL_CALLS]" + "f" * 300 + "{}"),
    ("mistral", "[TOOL_CALLS] a word too many {}"),
    ("mistral", "[ARGS]{} [TOOL_CALLS"),
    ("llama", " " * 64 + BARE),
]


@pytest.mark.parametrize(("form", "text"), NOT_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(form: str, text: str) -> None:
    assert parsed(form, [text]) == (text, [])
    assert parsed(form, list(text)) == (text, [])


@pytest.mark.parametrize("bad", [text for form, text in NOT_CALLS if form == "hermes"])
def test_a_good_call_beside_a_bad_one_is_found(bad: str) -> None:
    good = hermes(ONE)
    content, calls = parsed("hermes", [good, bad])
    assert calls == [("f", ARGUMENTS)] and content == bad.lstrip()
    if bad.count("{") == bad.count("}") and "\\" not in bad and bad.endswith(">"):
        assert parsed("hermes", [bad, good]) == (bad, [("f", ARGUMENTS)])


MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
FRAGMENTS = st.sampled_from(
    [*MARKS, ONE, BARE, f"[{ONE},{ONE}]", '{"name": "f", ', '"arguments": {}}', "f", "{", "}", "["]
    + ["]", ";", '"', "\\", "\n", " ", "{}", "a", "é🙂", "<", "<tool", "_call>", ",", " " * 50]
)


@settings(max_examples=400, deadline=None)
@given(
    form=st.sampled_from(["hermes", "llama", "mistral"]),
    parts=st.lists(FRAGMENTS, max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    parallel=st.booleans(),
)
def test_any_cut_gives_the_same(
    form: str, parts: list[str], cuts: list[int], parallel: bool
) -> None:
    text = "".join(parts)
    whole = parsed(form, [text], parallel)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert parsed(form, pieces, parallel) == whole
    assert parsed(form, list(text), parallel) == whole
    assert len(whole[1]) <= 1 or parallel
    if not whole[1]:
        assert whole[0] == text
    if parallel:
        kept = whole[0] + "".join(name + arguments for name, arguments in whole[1])
        assert len(kept) <= len(text)


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(["hermes", "mistral"]),
    before=st.text(st.characters(exclude_characters="<[ \t\r\n"), max_size=20),
    arguments=st.lists(
        st.dictionaries(
            st.text(max_size=5),
            st.none()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=9),
            max_size=3,
        ),
        min_size=1,
        max_size=3,
    ),
    ascii_only=st.booleans(),
)
def test_what_was_written_is_read_back(
    form: str, before: str, arguments: list[dict[str, object]], ascii_only: bool
) -> None:
    reported = [json.dumps(each, ensure_ascii=ascii_only) for each in arguments]
    calls = [f'{{"name": "f", "arguments": {each}}}' for each in reported]
    if form == "hermes":
        text = before + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    else:
        text = f"{before}[TOOL_CALLS] [{', '.join(calls)}]"
    assert parsed(form, list(text)) == (before, [("f", each) for each in reported])


def test_one_call_where_only_one_is_wanted() -> None:
    parser = ToolCallParser(CallableTools(FORMS["hermes"], NAMES, parallel=False))
    assert parser.push(f"a{hermes(ONE)}{hermes(ONE)}b") == ("a", [ParsedCall(0, "f", ARGUMENTS)])
    assert parser.full and parser.push(hermes(ONE)) == ("", []) == parser.flush()
    assert parsed("mistral", [f"[TOOL_CALLS] [{ONE}, {ONE}]"], False) == ("", [("f", ARGUMENTS)])


def test_content_is_not_held_longer_than_it_must_be() -> None:
    parser = ToolCallParser(CallableTools(FORMS["hermes"], NAMES))
    assert parser.push("one two") == ("one two", [])
    assert parser.push(" \n") == ("", [])
    assert parser.push("three <tool") == (" \nthree", [])
    assert parser.push("s>") == (" <tools>", [])
    assert parser.push("<tool_call>f") == ("<tool_call>f", [])  # no object: no call
    assert parser.push('<tool_call>{"name" ') == ("", [])
    assert parser.push("b <b>") == ('<tool_call>{"name" b <b>', [])  # no JSON: no call


@pytest.mark.parametrize(
    "piece",
    ['<tool_call>{"', '<tool_call>{":', "<tool_call>{", '<tool_call> "{', "x" * 16, " " * 16],
)
@pytest.mark.parametrize("start", ["", '<tool_call>{"name": "'])
def test_no_text_is_read_again_and_again(start: str, piece: str) -> None:
    """A model that repeats itself must not hold up the router: this takes a hundredth of the
    limit, and minutes if each piece or each opening made it read all that is held."""
    parser = ToolCallParser(CallableTools(FORMS["hermes"], NAMES))
    parser.push(start)
    started = time.process_time()
    for _ in range(20_000):
        parser.push(piece)
    parser.flush()
    assert time.process_time() - started < 5 * slowness()


@pytest.mark.parametrize(
    ("form", "piece"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "g", "arguments": {}}</'),
        ("mistral", "[TOOL_CALLS]?"),
        ("llama", "<|python_tag|>{}"),
        ("qwen3_coder", "<tool_call><function="),
        ("qwen3_coder", '<function=f><parameter=a>["'),
        ("qwen3_coder", "<function=f><parameter=a>b"),
        ("glm", "<tool_call>f<arg_key>"),
        ("glm", '<tool_call>f<arg_key>a</arg_key><arg_value>["'),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
        ("gpt_oss", "to=functions.f"),
    ],
)
def test_what_comes_at_once_is_not_copied_for_each_false_opening(form: str, piece: str) -> None:
    """It took 25 times as long for five times as many."""

    def seconds(count: int) -> float:
        text = piece * count + "</parameter></arg_value>x"
        parser = ToolCallParser(CallableTools(FORMS[form], NAMES))
        started = time.process_time()
        first, _ = parser.push(text)
        rest, _ = parser.flush()
        took_s = time.process_time() - started
        assert first + rest == text
        return took_s

    assert seconds(25_000) < 12 * seconds(5_000)


@pytest.mark.parametrize("count", [1, 5, 40])
def test_calls_after_many_false_openings_are_content(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the text is cut, they are so from the same place on."""
    monkeypatch.setattr(tool_calls, "REREAD_CHARS", 800)
    call = "<function=f><parameter=a>1</parameter></function>"
    text = '<function=f><parameter=a>["' * count + "</parameter>x" + call
    whole = parsed("qwen3_coder", [text])
    assert (
        whole == parsed("qwen3_coder", list(text)) == parsed("qwen3_coder", [text[:50], text[50:]])
    )
    assert bool(whole[1]) == (count < 40)
