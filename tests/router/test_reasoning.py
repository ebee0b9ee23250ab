"""Reasoning is separated from the answer, however the text is split, and grammars begin after
it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from baton.router.text.reasoning import AnswerReasoning, ReasoningForm
from baton.router.text.tokenizer import HfTokenizer
from tests.support.json_values import Json, JsonObject
from tests.support.router_process import RunningRouter, StartRouter

FORM = ReasoningForm("<think>", "</think>", 1, 2)
CASES = {
    # text: reasoning and content where the prompt has not opened it, and where it has
    "<think>\nso\n</think>\n\nfour": (("so", "four"), ("<think>\nso", "four")),
    "so </think> four": (("", "so </think> four"), ("so", "four")),
    "four": (("", "four"), ("four", "")),
    "<think>a <b> </thin k></think>c</think>": (
        ("a <b> </thin k>", "c</think>"),
        ("<think>a <b> </thin k>", "c</think>"),
    ),
    "  <think></think>  x": (("", "x"), ("<think>", "x")),
    "<thinker": (("", "<thinker"), ("<thinker", "")),
    "<think>never ends \n": (("never ends \n", ""), ("<think>never ends \n", "")),
    "<think>\n </think>\n<tool_call>": (("", "<tool_call>"), ("<think>", "<tool_call>")),
}


def parsed(parts: list[str], opened: bool) -> tuple[str, str]:
    parser = AnswerReasoning(FORM, opened).parser()
    found = [parser.push(part) for part in parts] + [parser.flush()]
    return "".join(first for first, _ in found), "".join(second for _, second in found)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("text", CASES)
def test_reasoning_and_content_are_separated(text: str, opened: bool) -> None:
    assert parsed([text], opened) == CASES[text][opened]
    assert parsed(list(text), opened) == CASES[text][opened]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "<", "/", "think>", "b "])),
    st.booleans(),
    st.data(),
)
def test_the_split_of_a_text_changes_nothing(
    pieces: list[str], opened: bool, data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(parts, opened) == parsed([text], opened) == parsed(list(text), opened)


@pytest.fixture
def thinking_model(tool_model: Callable[..., Path]) -> Callable[..., Path]:
    """A model whose template prints reasoning, and opens it if `opened` is given."""

    def make(special: bool = False) -> Path:
        folder = tool_model("hermes")
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = [tokenizers.AddedToken(text, special=special) for text in ("<think>", "</think>")]
        tokenizer.add_tokens(added)
        tokenizer.save(str(folder / "tokenizer.json"))
        for name, change in (
            ("config.json", {"vocab_size": tokenizer.get_vocab_size()}),
            ("tokenizer_config.json", {}),
        ):
            fields = json.loads((folder / name).read_text()) | change
            if name == "tokenizer_config.json":
                fields["chat_template"] += (
                    "{% if opened %}<think>\n{% endif %}"
                    "{% if closed %}<think>\n\n</think>\n\n{% endif %}"
                )
            (folder / name).write_text(json.dumps(fields))
        return folder

    return make


async def says(running: RunningRouter, folder: Path, text: str) -> None:
    tokenizer = HfTokenizer(folder / "tokenizer.json")
    tokens = await tokenizer.encode(text, add_special_tokens=False)
    await tokenizer.close()
    for worker in running.workers.values():
        worker.says = [tokens]


async def streamed(running: RunningRouter, **fields: Json) -> tuple[str, str]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    reasoning = content = ""
    async with running.http.stream("POST", "/v1/chat/completions", json=body | fields) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                reasoning += delta.get("reasoning_content") or ""
                content += delta.get("content") or ""
    return reasoning, content


@pytest.mark.parametrize("special", [False, True])
async def test_reasoning_has_a_field_of_its_own(
    router: StartRouter, thinking_model: Callable[..., Path], special: bool
) -> None:
    folder = thinking_model(special)
    async with router(folder) as running:
        for variables, text in (({}, "<think>\nthe cat\n</think>\n\nthe dog"),
                                ({"opened": True}, "the cat\n</think>\n\nthe dog")):  # fmt: skip
            await says(running, folder, text)
            fields = {"chat_template_kwargs": variables}
            message = (await running.chat(**fields)).json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("the cat", "the dog")
            assert await streamed(running, **fields) == ("the cat", "the dog")
        hidden = (await running.chat(**fields, include_reasoning=False)).json()
        assert "reasoning_content" not in hidden["choices"][0]["message"]
        assert hidden["choices"][0]["message"]["content"] == "the dog"


async def test_without_reasoning_an_answer_is_content(
    router: StartRouter, thinking_model: Callable[..., Path]
) -> None:
    folder = thinking_model()
    async with router(folder) as running:
        await says(running, folder, "the dog")
        for variables in ({}, {"closed": True}):
            answer = await running.chat(chat_template_kwargs=variables)
            assert answer.json()["choices"][0]["message"]["content"] == "the dog"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("mark", ["<think>", "</think>"])
async def test_marks_in_a_message_open_no_reasoning(
    router: StartRouter, thinking_model: Callable[..., Path], mark: str, special: bool
) -> None:
    """A system message that names the mark turned the whole answer into reasoning."""
    folder = thinking_model(special)
    messages = [
        {"role": "system", "content": f"Never write {mark} tags."},
        {"role": "user", "content": f"hi {mark}\n"},
    ]
    async with router(folder) as running:
        await says(running, folder, "the dog")
        for variables in ({}, {"closed": True}):
            answer = await running.chat(messages=messages, chat_template_kwargs=variables)
            message = answer.json()["choices"][0]["message"]
            assert (message["content"], message.get("reasoning_content")) == ("the dog", None)
        opened = {"opened": True}
        answer = await running.chat(messages=messages, chat_template_kwargs=opened)
        assert answer.json()["choices"][0]["message"]["reasoning_content"] == "the dog"


@pytest.mark.parametrize(
    ("variables", "opened"), [({}, False), ({"opened": True}, True), ({"closed": True}, False)]
)
async def test_a_grammar_begins_after_the_reasoning(
    router: StartRouter,
    thinking_model: Callable[..., Path],
    variables: JsonObject,
    opened: bool,
) -> None:
    folder = thinking_model()
    async with router(folder) as running:
        await running.chat(
            max_tokens=1,
            chat_template_kwargs=variables,
            response_format={"type": "json_object"},
        )
        (held,) = running.workers["decode-0"].held.values()
        grammar = held.submit.sampling.grammar
        assert grammar.HasField("reasoning") and grammar.reasoning.opened == opened
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert grammar.reasoning.closing == tokenizer.token_to_id("</think>")


async def test_a_model_without_marks_has_no_reasoning(router: StartRouter) -> None:
    async with router() as running:
        await running.chat(max_tokens=1, response_format={"type": "json_object"})
        (held,) = running.workers["decode-0"].held.values()
        assert not held.submit.sampling.grammar.HasField("reasoning")
