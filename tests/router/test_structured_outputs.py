"""Constraints of answers: what reaches the workers, and what is refused with which words."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from baton.router.grammars import grammar_validator
from baton.router.grammars.constraint import Constraint
from baton.router.grammars.grammar_validator import GrammarValidator, VocabularyFile
from baton.runtime.errors import InvalidRequest, Overloaded, Unavailable
from baton.runtime.grammar.matcher import GrammarMatcher, compile_grammar
from baton.runtime.grammar.vocabulary import Vocabulary, read_vocabulary
from tests.support.json_values import JsonObject
from tests.support.router_process import RunningRouter, StartRouter

SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["city", "n"],
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "other"}}
ANSWER = '{"city":"Bonn","n":3}'
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Bonn", "n": 3}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "other", "arguments": {"x": 1}}\n</tool_call>'


BROKEN_CHILD = """\
#!{python}
import sys

def answer(body):
    sys.stdout.buffer.write(len(body).to_bytes(4, "little") + body)
    sys.stdout.buffer.flush()

for body in (b'{{"ready": true}}', {answer!r}):
    sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(4), "little"))
    answer(body)
sys.stdin.buffer.read()
"""


def vocabulary_of(folder: Path) -> Vocabulary:
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return read_vocabulary(folder / "tokenizer.json", size, [1])


async def matcher_of(running: RunningRouter, folder: Path) -> GrammarMatcher:
    """The grammar of the newest submission, compiled as a worker does."""
    (held, *_) = reversed(running.workers["decode-0"].held.values())
    vocabulary = vocabulary_of(folder)
    assert held.submit.sampling.grammar.vocabulary == vocabulary.digest
    return compile_grammar(held.submit.sampling.grammar.text, vocabulary).matcher()


def takes(matcher: GrammarMatcher, folder: Path, text: str) -> bool:
    """Whether the text is a whole output of the grammar."""
    tokens = vocabulary_of(folder).tokenizer.tokenize_str(text, parse_special=True)
    return matcher.consume(tokens) == len(tokens) and matcher.complete


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a":[1,"x"]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            ANSWER,
            '{"city":"Bonn"}',
        ),
        ({"structured_outputs": {"json": SCHEMA}}, ANSWER, '{"city":"Bonn","n":"3"}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ANSWER, "{}"),
        ({"structured_outputs": {"regex": "[ab]{2}c"}}, "abc", "abcc"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
        ({"structured_outputs": {"grammar": 'start: "a" start | "b"'}}, "aab", "aa"),
        ({"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}}, "aab", "ba"),
    ],
)
async def test_a_constraint_reaches_the_worker_as_a_grammar(
    router: StartRouter, model_folder: Path, fields: JsonObject, right: str, wrong: str
) -> None:
    async with router() as running:
        for ask in (running.chat, running.complete):
            answer = await ask(max_tokens=1, **fields)
            assert answer.status_code == 200, answer.text
            assert takes(await matcher_of(running, model_folder), model_folder, right)
            assert not takes(await matcher_of(running, model_folder), model_folder, wrong)


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"tool_choice": "required"}, CALL, "hello"),
        ({"tool_choice": "required"}, f"{CALL}\n{OTHER_CALL}", f"{CALL} then"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, CALL, f"{CALL}\n{CALL}"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "look_up"}}},
            CALL,
            OTHER_CALL,
        ),
        (
            {"tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}]},
            f"So: {CALL}",
            CALL.replace("3}}", '"3"}}'),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            ANSWER,
            "hello",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            CALL,
            '{"city":"Bonn"}',
        ),
    ],
)
async def test_tools_constrain_the_answer_to_calls(
    router: StartRouter,
    tool_model: Callable[..., Path],
    fields: JsonObject,
    right: str,
    wrong: str,
) -> None:
    folder = tool_model("hermes", ("<tool_call>", "</tool_call>"))
    async with router(folder) as running:
        answer = await running.chat(max_tokens=1, **{"tools": [TOOL, OTHER], **fields})
        assert answer.status_code == 200, answer.text
        assert takes(await matcher_of(running, folder), folder, right)
        assert not takes(await matcher_of(running, folder), folder, wrong)


@pytest.mark.parametrize(
    ("form", "call"),
    [
        ("llama", '{"name": "look_up", "parameters": {"city": "Bonn", "n": 3}}'),
        ("mistral", '[TOOL_CALLS][{"name": "look_up", "arguments": {"city": "Bonn", "n": 3}}]'),
    ],
)
async def test_forced_calls_have_the_model_s_form(
    router: StartRouter, tool_model: Callable[..., Path], form: str, call: str
) -> None:
    folder = tool_model(form, ("[TOOL_CALLS]",) if form == "mistral" else ())
    async with router(folder) as running:
        answer = await running.chat(max_tokens=1, tools=[TOOL], tool_choice="required")
        assert answer.status_code == 200, answer.text
        assert takes(await matcher_of(running, folder), folder, call)


async def test_the_text_format_and_auto_constrain_nothing(
    router: StartRouter, tool_model: Callable[..., Path]
) -> None:
    async with router(tool_model("hermes")) as running:
        await running.chat(
            max_tokens=1, tools=[TOOL], tool_choice="auto", response_format={"type": "text"}
        )
        (held,) = running.workers["decode-0"].held.values()
        assert not held.submit.sampling.HasField("grammar")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"structured_outputs": {"json": {"properties": {"a": {"not": {}}}}}},
            "structured_outputs.json",
            'keyword "not" (at properties.a.not) is not supported',
        ),
        (
            {"structured_outputs": {"regex": "b(a"}},
            "structured_outputs.regex",
            "invalid regex 'b(a' at character 2: unclosed group",
        ),
        (
            {"structured_outputs": {"json": {"properties": {"a": {"type": "strin"}}}}},
            "structured_outputs.json",
            "Invalid type: strin (at properties.a.type)",
        ),
        (
            {"structured_outputs": {"grammar": "root ::= other\nother ::= missing"}},
            "structured_outputs.grammar",
            "Rule 'missing' not found at line 2",
        ),
        (
            {"structured_outputs": {"grammar": "start: b"}},
            "structured_outputs.grammar",
            "1(8): unknown name",
        ),
        (
            {"structured_outputs": {"json": {"anyOf": []}}},
            "structured_outputs.json",
            "Unsatisfiable",
        ),
        (
            {"structured_outputs": {"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}},
            "structured_outputs.json",
            '"oneOf": its cases overlap',
        ),
        (
            {"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "give one",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "give one",
        ),
        (
            {"structured_outputs": {"choice": ["x" * 4000] * 64}},
            "structured_outputs.choice",
            "at most 131072",
        ),
        (
            {"structured_outputs": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}},
            "structured_outputs.grammar",
            "too deeply nested",
        ),
    ],
)
async def test_a_bad_constraint_is_refused_by_name(
    router: StartRouter, fields: JsonObject, param: str, words: str
) -> None:
    async with router() as running:
        for _ in range(2):  # validated, then from the kept answers
            answer = await running.chat(max_tokens=1, **fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert words in error["message"]
        assert (
            await running.chat(max_tokens=1, structured_outputs={"choice": ["a"]})
        ).status_code == 200


async def test_a_named_tool_has_to_be_there(
    router: StartRouter, tool_model: Callable[..., Path]
) -> None:
    async with router(tool_model("hermes")) as running:
        named = {"type": "function", "function": {"name": "missing"}}
        answer = await running.chat(tools=[TOOL], tool_choice=named)
        assert answer.json()["error"]["param"] == "tool_choice.function.name"


@pytest.fixture
async def validator(model_folder: Path) -> AsyncIterator[GrammarValidator]:
    size = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    made = GrammarValidator(VocabularyFile(model_folder / "tokenizer.json", size, [1]))
    yield made
    await made.close()


async def test_a_constraint_that_takes_too_long_ends_the_process(
    validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await validator.grammar(Constraint("regex", "a", "f"))
    monkeypatch.setattr(validator, "_answer_s", 0.0)
    with pytest.raises(InvalidRequest, match="f: it takes over 0 s"):
        await validator.grammar(Constraint("regex", "b", "f"))
    monkeypatch.setattr(validator, "_answer_s", 30.0)
    assert (await validator.grammar(Constraint("regex", "c", "f"))).text


class LaterClock:
    """The module `time`, with a monotonic clock that is some seconds ahead."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def monotonic(self) -> float:
        return time.monotonic() + self._seconds


def grammar_processes() -> list[int]:
    """The process ids of this process's children that compile grammars."""
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "grammar_child"],
        capture_output=True,
        text=True,
        check=False,  # 1: there is none
    )
    return [int(each) for each in found.stdout.split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_all_processes_leaves_grammars_to_the_router(
    validator: GrammarValidator, number: signal.Signals
) -> None:
    """A router that drains still validates what it has accepted."""
    await validator.grammar(Constraint("regex", "a", "f"))
    (process,) = grammar_processes()
    os.kill(process, number)
    assert (await validator.grammar(Constraint("regex", "b", "f"))).text
    assert grammar_processes() == [process]


@pytest.mark.parametrize("answer", [b"{no JSON", b"\xff", b"[]", b'{"neither": 1}'])
async def test_a_broken_answer_of_the_process_is_unavailable(
    validator: GrammarValidator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """It says nothing of the constraint: the next request gets a new process."""
    child = tmp_path / "child"
    child.write_text(BROKEN_CHILD.format(python=sys.executable, answer=answer))
    child.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(child))
        with pytest.raises(Unavailable, match="unreadable answer"):
            await validator.grammar(Constraint("regex", "a", "f"))
    assert (await validator.grammar(Constraint("regex", "a", "f"))).text


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_constraint_without_an_answer_is_tried_again_later(
    validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """That its process stood still once was held against it from then on."""
    await validator.grammar(Constraint("regex", "a", "f"))
    monkeypatch.setattr(validator, "_answer_s", 1.0)
    (process,) = grammar_processes()
    os.kill(process, number)
    for _ in range(2):  # then from the kept answers
        with pytest.raises(InvalidRequest, match="to compile: make it smaller"):
            await validator.grammar(Constraint("regex", "b", "f"))
    assert grammar_processes() == []  # and it starts none
    monkeypatch.setattr(validator, "_answer_s", 30.0)
    monkeypatch.setattr(grammar_validator, "time", LaterClock(31.0))
    assert (await validator.grammar(Constraint("regex", "b", "f"))).text


async def test_a_caller_that_leaves_does_not_end_a_validation(validator: GrammarValidator) -> None:
    asking = asyncio.create_task(validator.grammar(Constraint("regex", "a", "f")))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await validator.grammar(Constraint("regex", "a", "f"))).text


async def test_too_many_waiting_constraints_are_refused(
    validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_validator, "MAX_QUEUE", 2)
    asked = [
        asyncio.create_task(validator.grammar(Constraint("regex", sign * 3, "f")))
        for sign in "abcd"
    ]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(each, Overloaded) for each in found] == [False, False, True, True]


async def test_a_constraint_that_no_request_waits_for_is_not_compiled(
    validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that had ended once held up all others behind their constraints."""
    exchange, asked = grammar_validator._exchange, []

    async def counted(process: asyncio.subprocess.Process, message: bytes) -> JsonObject:
        asked.append(message)
        return await exchange(process, message)

    monkeypatch.setattr(grammar_validator, "_exchange", counted)
    kept = asyncio.create_task(validator.grammar(Constraint("regex", "a", "f")))
    left = [
        asyncio.create_task(validator.grammar(Constraint("regex", sign, "f"))) for sign in "bcd"
    ]
    await asyncio.sleep(0)
    for each in left:
        each.cancel()
    assert (await kept).text
    assert (await validator.grammar(Constraint("regex", "e", "f"))).text
    assert [b"regex" in each for each in asked] == [False, True, True]  # the vocabulary, a, e
