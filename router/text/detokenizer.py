"""Incremental detokenization: tokens in, text out, never half a character.

    tokens   ─▶  [ e2 ] [ 82 ac ] [ 20 61 ]
    text out ─▶   ""      "€"       " a"

The bytes of an unfinished character are held until it is complete, and become U+FFFD only when
another character or the end proves that it never will be. The pieces add up to the decoding of
all tokens at once. One detokenizer serves one choice, and owns its state. Why it is our own:
docs/decisions/0072-own-detokenizer.md.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Protocol

import orjson
import tokenizers

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6  # of the prompt, so that a leading space is kept
_MAX_HELD_TOKENS = 16  # more are no character: that has at most 4 bytes


class Detokenizer(Protocol):
    def push(self, token: int) -> str:
        """Return the text that is certain with this token; it may be empty."""
        ...

    def flush(self) -> str:
        """Return the text of the held tokens, at the end of the output."""
        ...


class ByteDetokenizer:
    """A detokenizer for byte-level vocabularies: it looks up each token's bytes in a table."""

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
    """A detokenizer for any other vocabulary: it decodes a short window without and with the new
    token, and returns the difference. Special tokens are left out of the window: alone in it, one
    would give no context, and the space before the next word would be lost."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        special: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._special = special
        context = islice(
            (token for token in reversed(prompt) if token not in special), _CONTEXT_TOKENS
        )
        self._window = [*context][::-1]
        self._known = len(self._window)  # tokens of the window whose text was returned
        self._before = decode(self._window) if self._window else ""

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(self._window) - self._known
        if text.endswith(REPLACEMENT) and held < _MAX_HELD_TOKENS:
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


class SpecialTokenDetokenizer:
    """Adds the texts of some special tokens, which the inner detokenizer leaves out."""

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
    """Return the bytes of every token if the tokenizer's decoder is byte-level, else None."""
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
        except KeyError:  # an added token that is not in the byte alphabet
            table[token] = piece.encode(errors="replace")
    return table


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter in byte-level vocabularies (GPT-2's table): printable Latin-1
    letters are their own bytes; all other bytes have letters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    letters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return letters
