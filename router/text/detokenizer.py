"""Incremental detokenization: tokens in, text out, never half a character.

    tokens   ─▶  [ e2 ] [ 82 ac ] [ 20 61 ]
    text out ─▶   ""      "€"       " a"

Bytes of an unfinished character are held until they are whole, and come out as U+FFFD only if
another character or the end proves that they never will be. Whatever the split, the pieces add
up to the decoding of all tokens at once. One detokenizer serves one choice, and owns its state.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Protocol

import orjson
import tokenizers

REPLACEMENT = "\ufffd"
_CONTEXT = 6  # tokens of the prompt, so that a leading space is kept
_HELD_TOKENS = 16  # a character has 4 bytes at most: what is held longer is no character


class Detokenizer(Protocol):
    def push(self, token: int) -> str:
        """The text that became certain with this token; often all of it, maybe none."""
        ...

    def flush(self) -> str:
        """What is still held, at the end of the output."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: each token is a run of bytes, looked up in a table."""

    def __init__(self, table: Mapping[int, bytes], special: Collection[int]) -> None:
        self._table = table
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        return self._decoder.decode(self._table.get(token, b""))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: decodes a short window of tokens twice, before and after. Special
    tokens stay out of the window: one alone in it would be no context, and the space before the
    next word would be lost."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        special: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._special = special
        context = islice((token for token in reversed(prompt) if token not in special), _CONTEXT)
        self._window = [*context][::-1]
        self._known = len(self._window)  # tokens of the window whose text is out
        self._before = decode(self._window) if self._window else ""

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(self._window) - self._known
        if text.endswith(REPLACEMENT) and held < _HELD_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        if self._known == len(self._window):
            return ""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        piece = text[len(self._before) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._before = self._decode(self._window)
        return piece


class MarkingDetokenizer:
    """Another one, and beside it the text of some special tokens, which it leaves out."""

    def __init__(self, inner: Detokenizer, marks: Mapping[int, str]) -> None:
        self._inner = inner
        self._marks = marks

    def push(self, token: int) -> str:
        mark = self._marks.get(token)
        return self._inner.push(token) if mark is None else self._inner.flush() + mark

    def flush(self) -> str:
        return self._inner.flush()


def byte_level_bytes(
    tokenizer: tokenizers.Tokenizer, vocabulary: Mapping[str, int]
) -> dict[int, bytes] | None:
    """The bytes of every token if the tokenizer's decoder is the byte-level one, else None."""
    decoder = orjson.loads(tokenizer.to_str()).get("decoder") or {}
    if decoder.get("type") == "Sequence" and len(decoder.get("decoders", ())) == 1:
        decoder = decoder["decoders"][0]
    if decoder.get("type") != "ByteLevel":
        return None
    letters = _byte_letters()
    table = {}
    for piece, token in vocabulary.items():
        try:
            table[token] = bytes(letters[letter] for letter in piece)
        except KeyError:  # an added token outside the byte alphabet stands for itself
            table[token] = piece.encode(errors="replace")
    return table


def _byte_letters() -> dict[str, int]:
    """The printable letter of each byte in byte-level vocabularies (GPT-2's table): printable
    Latin-1 stands for itself, the rest for letters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    letters.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return letters
