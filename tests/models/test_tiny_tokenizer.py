"""The trained model's tokenizer: digits, round trips, and one rendering everywhere."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from baton.models.corpus import mix
from baton.models.corpus.conversation import Conversation
from baton.models.training import tiny_tokenizer
from baton.models.training.tiny_tokenizer import ENTRIES, SPECIAL_TOKENS, ChatEncoder
from baton.router.templates.chat_template import ChatTemplate
from baton.router.templates.tool_support import support_of
from baton.router.text.call_form import CallableTools
from baton.router.text.tokenizer import HfTokenizer
from baton.router.text.tool_calls import ToolCallParser
from tests.support.json_values import JsonObject

Messages = list[JsonObject]


@cache
def trained() -> Tokenizer:
    return tiny_tokenizer.train()


@cache
def encoder() -> ChatEncoder:
    return ChatEncoder(trained())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.write(trained(), made, 2048)
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def talks() -> list[Conversation]:
    return [mix.of_task(seed, task, held_out=False) for task in mix.TASKS for seed in range(6)]


@pytest.mark.nightly
def test_training_is_reproducible_and_stays_within_the_entries() -> None:
    assert tiny_tokenizer.train().to_str() == trained().to_str()
    assert 3000 < trained().get_vocab_size() <= ENTRIES


def test_special_tokens_come_first_and_stay_whole() -> None:
    for number, token in enumerate(SPECIAL_TOKENS):
        assert trained().token_to_id(token) == number
        assert trained().encode(f"a{token}b").ids.count(number) == 1


@given(st.text(max_size=80))
@settings(deadline=None, max_examples=100)
def test_any_text_survives_a_round_trip(text: str) -> None:
    ids = trained().encode(text, add_special_tokens=False).ids
    if not any(token in text for token in SPECIAL_TOKENS):
        assert trained().decode(ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token() -> None:
    for text in ("1789", "a27b", "3+4", "x-99."):
        tokens = [trained().decode([number]) for number in trained().encode(text).ids]
        assert [token for token in tokens if any(sign.isdigit() for sign in token)] == [
            sign for sign in text if sign.isdigit()
        ]


def test_words_of_the_world_are_single_tokens() -> None:
    for word in (" Anna", "Anna", " Lisbon", " lantern", " golden", " Wednesday", " code"):
        assert len(trained().encode(word).ids) == 1, word


def test_calls_are_written_in_the_text() -> None:
    text = '<tool_call>{"name": "x"}</tool_call>'
    assert trained().decode(trained().encode(text).ids) == text


# -- one rendering everywhere ------------------------------------------------------------------


def test_encoded_conversations_are_what_transformers_renders(
    loaded: PreTrainedTokenizerBase,
) -> None:
    for talk in talks():
        rendered = loaded.apply_chat_template(
            list(talk.messages), tools=list(talk.tools) or None, tokenize=False
        )
        assert rendered == "".join(text + "<|end|>" for text in tiny_tokenizer.texts(talk))
        assert loaded(rendered).input_ids == list(encoder().encode(talk).ids)


def router_render(messages: Messages, tools: Messages | None) -> str:
    return ChatTemplate(tiny_tokenizer.CHAT_TEMPLATE, {}).render(messages, tools)


def test_the_router_renders_what_transformers_renders(loaded: PreTrainedTokenizerBase) -> None:
    template = ChatTemplate(tiny_tokenizer.CHAT_TEMPLATE, {"eos_token": "<|end|>"})
    for talk in talks():
        messages = list(talk.messages)[:-1]
        wanted = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == wanted
        tools = list(talk.tools) or None
        wanted = loaded.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert template.render(messages, tools) == wanted


async def test_the_router_tokenizes_what_was_trained_on(folder: Path) -> None:
    template, tokenizer = (
        ChatTemplate(tiny_tokenizer.CHAT_TEMPLATE, {}),
        HfTokenizer(folder / "tokenizer.json"),
    )
    for talk in talks():
        prompt = template.render(list(talk.messages[:-1]), list(talk.tools))
        ids = await tokenizer.encode(prompt, add_special_tokens=False)
        _, start, end = encoder().encode(talk).answers[-1]
        assert tuple(ids) == encoder().encode(talk).ids[:start]
        answer = encoder().encode(talk).ids[start : end - 1]
        assert tokenizer.decode(answer) == talk.messages[-1]["content"]
    await tokenizer.close()


def test_the_router_reads_the_calls_that_were_trained_on() -> None:
    form = support_of(ChatTemplate(tiny_tokenizer.CHAT_TEMPLATE, {})).form
    assert form is not None
    seen = 0
    for talk in talks():
        names = frozenset(tool["function"]["name"] for tool in talk.tools)
        for message in talk.messages:
            if message["role"] != "assistant":
                continue
            parser = ToolCallParser(CallableTools(form, names))
            reported = tiny_tokenizer.texts(Conversation((message,), ("",), (), frozenset()))[0]
            text, calls = parser.push(reported.removeprefix("<|assistant|>"))
            rest, more = parser.flush()
            assert text + rest == (message["content"] or "")
            wanted = [each["function"] for each in message.get("tool_calls", ())]
            assert [call.name for call in calls + more] == [each["name"] for each in wanted]
            for call, each in zip(calls + more, wanted, strict=True):
                assert call.arguments == json.dumps(each["arguments"], ensure_ascii=False)
            seen += len(wanted)
    assert seen > 5


@pytest.mark.parametrize(
    ("messages", "tools", "wanted"),
    [
        (
            [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
            None,
            "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}],
            None,
            "<|user|>ab<|end|><|assistant|>",
        ),
        (
            [{"role": "user", "content": "x"}],
            [
                {"type": "function", "function": {"name": "f"}},
                {
                    "type": "function",
                    "function": {
                        "name": "g",
                        "description": "does g",
                        "parameters": {"properties": {"b": {}, "a": {}}},
                    },
                },
            ],
            "<|system|>Tools: f(). g(b, a): does g.<|end|><|user|>x<|end|><|assistant|>",
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
                },
                {"role": "tool", "content": "4"},
            ],
            None,
            '<|assistant|><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|end|>'
            "<|tool|>4<|end|><|assistant|>",
        ),
    ],
)
def test_the_chat_template(
    loaded: PreTrainedTokenizerBase, messages: Messages, tools: Messages | None, wanted: str
) -> None:
    rendered = loaded.apply_chat_template(
        copy.deepcopy(messages), tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert rendered == wanted
    assert router_render(messages, tools) == wanted


def test_an_unknown_role_is_refused(loaded: PreTrainedTokenizerBase) -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role"):
        loaded.apply_chat_template([{"role": "robot", "content": "x"}], tokenize=False)


# -- what is learnt ----------------------------------------------------------------------------


def test_answers_are_where_the_assistant_speaks() -> None:
    for talk in talks():
        chat = encoder().encode(talk)
        said = [
            json.dumps(message["tool_calls"][0]["function"])
            if message.get("tool_calls")
            else message["content"]
            for message in talk.messages
            if message["role"] == "assistant"
        ]
        assert len(said) == len(chat.answers)
        for text, (task, start, end) in zip(said, chat.answers, strict=True):
            assert trained().id_to_token(chat.ids[start - 1]) == "<|assistant|>"
            assert trained().id_to_token(chat.ids[end - 1]) == "<|end|>"
            reported = trained().decode(chat.ids[start:end])
            assert reported.removeprefix("<tool_call>").removesuffix("</tool_call>") == text
            assert task in talk.tasks


def test_measure_counts_what_messages_add() -> None:
    for talk in talks():
        if not talk.tools:
            assert encoder().measure(talk.messages) == len(encoder().encode(talk).ids)
