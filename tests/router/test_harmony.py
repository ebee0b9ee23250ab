"""gpt-oss's channels: reasoning, content and calls, however the text is split; and grammars that
begin with the reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.requests.answer_forms import reasoning_form
from baton.router.templates.chat_template import ChatTemplate
from baton.router.text.call_forms import FORMS
from baton.router.text.harmony import MAX_HEADER_CHARS, HarmonyForm, HarmonyParser
from baton.router.text.reasoning import ReasoningForm
from baton.runtime.grammar.matcher import compile_grammar
from baton.runtime.grammar.vocabulary import read_vocabulary
from tests.support.json_values import Json, JsonObject
from tests.support.router_process import RunningRouter, StartRouter

FAMILY = Path(__file__).parent / "families" / "gpt_oss.jinja"
THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Bonn"}<|call|>'
NO_HEADER = "<|channel|>" + "x" * MAX_HEADER_CHARS
CASES = {
    # text: reasoning and content
    f"{THOUGHT}{FINAL}Four.<|return|>": ("Let me see.", "Four."),
    f"{FINAL}4 < 5 <| 6": ("", "4 < 5 <| 6"),
    "plain text": ("", "plain text"),
    "to be": ("", "to be"),
    "": ("", ""),
    f"{THOUGHT}{THOUGHT}{FINAL}x": ("Let me see.\nLet me see.", "x"),
    f"{THOUGHT}{CALL}": ("Let me see.", CALL),
    f"{THOUGHT}<|channel|>commentary<|message|>I call.<|end|><|start|>assistant{CALL}": (
        "Let me see.",
        f"I call.{CALL}",
    ),
    f"<|channel|>commentary<|message|>One.<|end|><|start|>assistant{FINAL}Two.": ("", "One.\nTwo."),
    "<|channel|>analysis<|message|>never ends": ("never ends", ""),
    f"{THOUGHT}<|channel|>fin": ("Let me see.", ""),  # a header that the end cut
    f"{THOUGHT}<|channel|>commentary to=functions.f": (
        "Let me see.",
        "<|channel|>commentary to=functions.f",
    ),
    f"{NO_HEADER}<|end|>a": ("", f"{NO_HEADER}\na"),
}


def parsed(parts: list[str], shown: bool = True) -> tuple[str, str]:
    parser = HarmonyParser(shown=shown)
    found = [parser.push(part) for part in parts] + [parser.flush()]
    return "".join(first for first, _ in found), "".join(second for _, second in found)


@pytest.mark.parametrize("text", CASES)
def test_channels_are_taken_apart(text: str) -> None:
    assert parsed([text]) == CASES[text]
    assert parsed(list(text)) == CASES[text]
    assert parsed([text], shown=False) == ("", CASES[text][1])


FRAGMENTS = ["<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>", "<|call|>"]
FRAGMENTS += ["assistant", "commentary", " to=functions.f", "<|return|>", "a", "<|", " ", "x" * 130]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.data())
def test_split_of_a_text_changes_nothing(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(parts) == parsed([text]) == parsed(list(text))


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
FORM = HarmonyForm(0, 0, 0, 0)


@pytest.fixture
def harmony_model(tool_model: Callable[..., Path]) -> Path:
    """A model with gpt-oss's template and marks; <|return|> and <|call|> are end tokens."""
    folder: Path = tool_model("hermes", FORM.markers)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    for name, change in (
        ("config.json", {"eos_token_id": ends}),
        ("tokenizer_config.json", {"chat_template": FAMILY.read_text(encoding="utf-8")}),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    return folder


def tokens_of(folder: Path, text: str) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


async def message_of(running: RunningRouter, folder: Path, text: str, **fields: Json) -> Json:
    for worker in running.workers.values():
        worker.says = [tokens_of(folder, text)]
    answer = await running.chat(**fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


async def test_answer_has_reasoning_content_and_calls(
    router: StartRouter, harmony_model: Path
) -> None:
    async with router(harmony_model) as running:
        made = await message_of(running, harmony_model, f"{THOUGHT}{FINAL}Four.<|return|>")
        assert made["message"]["reasoning_content"] == "Let me see."
        assert (made["message"]["content"], made["finish_reason"]) == ("Four.", "stop")
        made = await message_of(running, harmony_model, f"{THOUGHT}{CALL}", tools=[TOOL])
        (call,) = made["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"city": "Bonn"}'}
        assert made["message"]["reasoning_content"] == "Let me see."
        assert not made["message"]["content"] and made["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            [f'{THOUGHT}{FINAL}{{"city":"Bonn"}}', f'{FINAL}{{"city":"Bonn"}}'],
            [f"{FINAL}four", '{"city":"Bonn"}'],
        ),
        ({"structured_outputs": {"regex": "a+"}}, [f"{FINAL}aa"], [f"{FINAL}b"]),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            [THOUGHT + CALL.removesuffix("<|call|>")],
            [f"{FINAL}four", CALL.replace("city", "town")],
        ),
        (
            {
                "tools": [TOOL],
                "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            },
            [CALL.removesuffix("<|call|>"), f'{THOUGHT}{FINAL}{{"city":"Bonn"}}'],
            [f"{FINAL}four"],
        ),
    ],
)
async def test_grammar_admits_reasoning_before_the_answer(
    router: StartRouter,
    harmony_model: Path,
    fields: JsonObject,
    right: list[str],
    wrong: list[str],
) -> None:
    async with router(harmony_model) as running:
        answer = await running.chat(max_tokens=1, **fields)
        assert answer.status_code == 200, answer.text
        (held,) = running.workers["decode-0"].held.values()
        config = json.loads((harmony_model / "config.json").read_text())
        vocabulary = read_vocabulary(
            harmony_model / "tokenizer.json", config["vocab_size"], config["eos_token_id"]
        )
        grammar = held.submit.sampling.grammar
        assert grammar.vocabulary == vocabulary.digest and not grammar.HasField("reasoning")
        for text in [*right, *wrong]:
            matcher = compile_grammar(grammar.text, vocabulary).matcher()
            tokens = tokens_of(harmony_model, text)
            whole = matcher.consume(tokens) == len(tokens) and matcher.complete
            assert whole == (text in right), text


def test_markers_of_calls_are_those_of_the_channels() -> None:
    assert set(FORMS["gpt_oss"].markers) <= set(FORM.markers)


class Marks:
    """A tokenizer in which each mark is one token."""

    def token_id(self, text: str) -> int:
        return len(text)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3", ReasoningForm("<think>", "</think>", 7, 8)),
        ("deepseek_v3", ReasoningForm("<think>", "</think>", 7, 8)),
        ("deepseek_v3_1", ReasoningForm("<think>", "</think>", 7, 8)),
        ("glm4_5", ReasoningForm("<think>", "</think>", 7, 8)),
        ("gpt_oss", HarmonyForm(9, 11, 11, 7)),
        ("chatml", None),
    ],
)
def test_form_of_reasoning_is_found_from_the_template(
    family: str, form: ReasoningForm | HarmonyForm | None
) -> None:
    source = (FAMILY.parent / f"{family}.jinja").read_text(encoding="utf-8")
    tokenizer: Any = Marks()
    assert reasoning_form(ChatTemplate(source, {}), tokenizer) == form
