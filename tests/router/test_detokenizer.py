"""Any text, any tokens: pieces add up to the whole decoding and never split a character."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from baton.router.text.detokenizer import (
    SpecialTokenDetokenizer,
    WindowDetokenizer,
    byte_level_bytes,
)
from baton.router.text.tokenizer import HfTokenizer

TEXTS = st.text(
    alphabet=st.one_of(
        st.characters(blacklist_categories=["Cs"]), st.sampled_from("aé猫🎉🙂 \n\u200d\ufe0f\ufffd")
    ),
    max_size=40,
)
_MADE: dict[str, tokenizers.Tokenizer] = {}


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Iterator[HfTokenizer]:
    made = HfTokenizer(model_folder / "tokenizer.json")
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def plain(model_folder: Path) -> tokenizers.Tokenizer:
    """The library's own reading of the same file."""
    return tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))


def sentencepiece() -> tokenizers.Tokenizer:
    """A vocabulary of Llama's first kind: words with U+2581, and bytes as <0xNN>."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in "\u2581 abcdefghijklmnopqrstuvwxyzé猫".replace(" ", ""):
        vocabulary[piece] = len(vocabulary)
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def token_of(made: tokenizers.Tokenizer, piece: str) -> int:
    found = made.token_to_id(piece)
    assert found is not None
    return int(found)


def whole_characters(pieces: list[str], full: str) -> bool:
    """A replacement character may come out only where the full decoding has it too."""
    return "".join(pieces).count("\ufffd") == full.count("\ufffd")


@given(text=TEXTS)
def test_text_comes_back(tokenizer: HfTokenizer, plain: tokenizers.Tokenizer, text: str) -> None:
    tokens = plain.encode(text, add_special_tokens=False).ids
    detokenizer = tokenizer.detokenizer([])
    pieces = [detokenizer.push(token) for token in tokens]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text


@given(data=st.data())
def test_any_tokens_add_up_to_the_full_decoding(
    tokenizer: HfTokenizer, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    detokenizer = tokenizer.detokenizer([])
    pieces = [detokenizer.push(token) for token in tokens]
    pieces.append(detokenizer.flush())
    full = tokenizer.decode(tokens)
    assert "".join(pieces) == full
    assert whole_characters(pieces, full)


@given(text=TEXTS, prompt=st.sampled_from(["", "abc", "猫", " x"]))
def test_window_text_comes_back(text: str, prompt: str) -> None:
    made = _MADE.setdefault("window", sentencepiece())

    def decode(tokens: Iterable[int]) -> str:
        found: str = made.decode(list(tokens))
        return found

    before = made.encode(prompt).ids if prompt else []
    tokens = made.encode(text).ids
    detokenizer = WindowDetokenizer(decode, before)
    pieces = [detokenizer.push(token) for token in tokens]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == decode([*before, *tokens])[len(decode(before)) :]


@given(data=st.data())
def test_window_adds_up_with_special_tokens_in_between(data: st.DataObject) -> None:
    made = _MADE.get("special")
    if made is None:
        made = _MADE["special"] = sentencepiece()
        made.add_special_tokens(["<s>", "</s>", "[SEP]"])
    special = {token_of(made, piece) for piece in ("<s>", "</s>", "[SEP]")}
    some = st.sampled_from([*special, *(token_of(made, piece) for piece in "\u2581\u2581ab猫")])
    halves = st.integers(token_of(made, "<0xE0>"), token_of(made, "<0xFF>"))
    prompt = data.draw(st.lists(some, max_size=9))
    tokens = data.draw(st.lists(some | halves, max_size=20))
    detokenizer = WindowDetokenizer(lambda tokens: str(made.decode(list(tokens))), prompt, special)
    pieces = [*map(detokenizer.push, tokens), detokenizer.flush()]
    before = made.decode(prompt)
    assert "".join(pieces) == made.decode([*prompt, *tokens])[len(before) :]


def test_space_after_a_special_token_is_kept(tmp_path: Path) -> None:
    made = sentencepiece()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    detokenizer = HfTokenizer(tmp_path / "tokenizer.json").detokenizer([token_of(made, "a")])
    pieces = ["b", "</s>", "\u2581", "c", "<s>", "</s>", "\u2581", "a"]
    assert "".join(detokenizer.push(token_of(made, piece)) for piece in pieces) == "b c a"


def test_pending_bytes_are_held_until_whole() -> None:
    made = sentencepiece()
    ids = [token_of(made, f"<0x{byte:02X}>") for byte in "🎉".encode()]
    detokenizer = WindowDetokenizer(lambda tokens: str(made.decode(list(tokens))), [])
    assert [detokenizer.push(token) for token in ids] == ["", "", "", "🎉"]
    assert detokenizer.flush() == ""


def test_a_window_that_never_becomes_text_is_not_held_for_ever() -> None:
    made = sentencepiece()
    bad = token_of(made, "<0xFF>")
    detokenizer = WindowDetokenizer(lambda tokens: str(made.decode(list(tokens))), [])
    shown = [detokenizer.push(bad) for _ in range(100)]
    assert sum(map(len, shown)) > 50


def test_special_tokens_are_not_shown(tokenizer: HfTokenizer) -> None:
    detokenizer = tokenizer.detokenizer([])
    assert [detokenizer.push(token) for token in (0, 1, 2)] == ["", "", ""]


def test_a_special_token_is_shown_where_its_text_is_wanted(tokenizer: HfTokenizer) -> None:
    detokenizer = tokenizer.detokenizer([], ["<|im_end|>", "<unknown>", "the"])
    assert [detokenizer.push(token) for token in (0, 1, 2)] == ["", "<|im_end|>", ""]
    assert type(tokenizer.detokenizer([], ["the"])) is type(tokenizer.detokenizer([]))


def test_what_is_held_comes_before_a_special_token() -> None:
    made = sentencepiece()
    half = token_of(made, "<0xF0>")
    inner = WindowDetokenizer(lambda tokens: str(made.decode(list(tokens))), [])
    detokenizer = SpecialTokenDetokenizer(inner, {9999: "[MARK]"})
    assert detokenizer.push(half) == ""
    shown = detokenizer.push(9999)
    assert shown.endswith("[MARK]") and len(shown) > len("[MARK]")
    assert detokenizer.push(token_of(made, "a")) == "a"
    assert detokenizer.flush() == ""


def test_byte_table_covers_every_token(tokenizer: HfTokenizer, plain: tokenizers.Tokenizer) -> None:
    table = byte_level_bytes(plain, plain.get_vocab())
    assert table is not None and set(table) == set(range(tokenizer.vocab_size))
    assert byte_level_bytes(sentencepiece(), {}) is None


def test_token_bytes_of_a_byte_fallback_vocabulary(tmp_path: Path) -> None:
    made = sentencepiece()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HfTokenizer(tmp_path / "tokenizer.json")
    for piece, stands_for in (("<0xE2>", b"\xe2"), ("\u2581", b" "), ("é", "é".encode())):
        assert tokenizer.token_bytes(token_of(made, piece)) == stands_for
    asyncio.run(tokenizer.close())
