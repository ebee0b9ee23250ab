"""The demonstration tokenizer: round trips, words as entries, and its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from baton.models import demo_tokenizer
from baton.models.corpus import sentences
from baton.models.random_model import make_shaped_model

TOKENIZER = demo_tokenizer.train()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_shaped_model(
        tmp_path_factory.mktemp("tiny"),
        layers=1,
        hidden=32,
        heads=2,
        kv_heads=1,
        head_dim=16,
        ffn=32,
        vocab=2048,
        dtype="float32",
        seed=0,
    )
    return AutoTokenizer.from_pretrained(folder)


def test_sentences_depend_on_the_seed_alone() -> None:
    assert list(sentences(50, seed=1)) == list(sentences(50, seed=1))
    assert list(sentences(50, seed=1)) != list(sentences(50, seed=2))
    assert len(set(sentences(2000))) > 1500


def test_training_is_reproducible_and_fills_the_entries() -> None:
    assert demo_tokenizer.train().to_str() == TOKENIZER.to_str()
    assert TOKENIZER.get_vocab_size() == demo_tokenizer.TOKENIZER_ENTRIES


def test_special_tokens_come_first_and_stay_whole() -> None:
    for number, token in enumerate(demo_tokenizer.SPECIAL_TOKENS):
        assert TOKENIZER.token_to_id(token) == number
        assert TOKENIZER.encode(f"a{token}b").ids.count(number) == 1


@given(st.text(max_size=80))
@settings(deadline=None, max_examples=200)
def test_any_text_survives_a_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    if not any(token in text for token in demo_tokenizer.SPECIAL_TOKENS):
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_a_character_may_span_tokens() -> None:
    ids = TOKENIZER.encode("🦜").ids
    assert len(ids) == 4
    assert TOKENIZER.decode(ids[:3]) == "\ufffd"
    assert TOKENIZER.decode(ids) == "🦜"


def test_common_words_are_one_token_and_words_are_most_of_the_entries() -> None:
    for word in (" the", " house", " garden", " morning"):
        assert len(TOKENIZER.encode(word).ids) == 1
    words = demo_tokenizer.word_ids(TOKENIZER)
    assert len(words) > 800
    said = [TOKENIZER.decode([number]) for number in words]
    assert all(text.strip().isalpha() or text in ".,;:!?" for text in said)


def test_transformers_reads_the_folder(loaded: Any) -> None:
    text = 'The brave baker sings; why? {"count": 12}\n    return ü 🦜'
    assert loaded(text).input_ids == TOKENIZER.encode(text).ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == ("<|end|>", "<|pad|>", None)
    assert loaded.model_max_length == 2048


@pytest.mark.parametrize(
    ("messages", "options", "wanted"),
    [
        (
            [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
            {"add_generation_prompt": True},
            "<|system|>Be kind.<|end|>\n<|user|>Hi<|end|>\n<|assistant|>",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            {},
            "<|user|>a<|end|>\n<|assistant|>b<|end|>\n",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}],
            {},
            "<|user|>ab<|end|>\n",
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
                },
                {"role": "tool", "content": "4"},
            ],
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            '<|system|>Tools: [{"type": "function", "function": {"name": "f"}}]<|end|>\n'
            '<|assistant|>{"name": "f", "arguments": {}}<|end|>\n<|tool|>4<|end|>\n',
        ),
    ],
)
def test_the_chat_template(loaded: Any, messages: Any, options: Any, wanted: str) -> None:
    assert loaded.apply_chat_template(messages, tokenize=False, **options) == wanted


def test_an_unknown_role_is_refused(loaded: Any) -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role"):
        loaded.apply_chat_template([{"role": "robot", "content": "x"}], tokenize=False)


def test_writing_gives_what_tokenizers_reads_back(tmp_path: Path) -> None:
    demo_tokenizer.write(TOKENIZER, tmp_path, 128)
    back = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert back.encode("the old house").ids == TOKENIZER.encode("the old house").ids
