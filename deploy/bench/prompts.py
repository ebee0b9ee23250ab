"""Prompts of wanted lengths, which share prefixes as a trace's block hashes say.

    TraceRequest.blocks  ─▶  a piece for each block: eight words of its hash, then a part of the
                             fixed text that begins where the hash says
    the rest             ─▶  a piece of the request's own

The same block has the same piece, so prompts whose first blocks are equal begin with equal text,
and differ where a trace names no more blocks. Pieces are words, of which a tokenizer makes some
number of tokens (`TokenRate`, measured by two requests), or token ids, whose length is exact.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise

from baton.planner.traces import TraceRequest

VOCABULARY = """
air apple arm autumn baker barn bean bell bird blanket boat book bottle bread bridge brother
brush bucket butter cabin candle carpet cart castle chair cheese cherry city clay clock cloud coat
coffee copper corn cotton cup curtain dance desk door dream dress drum dust eagle ear
earth egg engine evening farm feather fence field finger fire fish flag floor flower flute forest
fox friend frost garden gate glass gold grain grass hammer hand harbor hat hill honey horse
house ice island jar journey kettle key king kitchen ladder lake lamp leaf lemon letter lion
market meadow milk mirror moon morning mountain mouse music nail needle nest night oak ocean orange
paper path pencil piano picture pillow pocket
"""
WORDS = VOCABULARY.split()
MARK_PARTS = 8  # words or ids at the start of a piece that are its hash
TEXT_PARTS = 8192  # of the fixed text, which repeats after them


@dataclass(frozen=True, slots=True)
class TokenRate:
    """A prompt of n words has `overhead_tokens` + n * `tokens_per_word` tokens."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0

    @classmethod
    def measured(cls, few: tuple[int, int], many: tuple[int, int]) -> TokenRate:
        """Return the line through two (words, tokens). Raises ValueError unless it rises."""
        rate = (many[1] - few[1]) / (many[0] - few[0])
        if rate <= 0:
            raise ValueError(f"{few[0]} words have {few[1]} tokens, {many[0]} have {many[1]}")
        return cls(rate, max(0.0, few[1] - few[0] * rate))


class TextPrompts:
    """Makes prompts of words. `scale`: blocks are so many times as long as requests say."""

    def __init__(self, rate: TokenRate, seed: int, scale: float = 1.0) -> None:
        self._rate = rate
        self._seed = seed
        self._parts_per_token = scale / rate.tokens_per_word
        rng = random.Random(TEXT_PARTS)
        words = rng.choices(WORDS, k=TEXT_PARTS)
        self._text = " ".join(words) + " "
        self._starts = [0, *accumulate(len(word) + 1 for word in words)]

    def prompt(self, number: int, asked: TraceRequest) -> str:
        """Return the prompt of a request with its number in the load."""
        tokens = asked.prompt_tokens - self._rate.overhead_tokens
        parts = max(1, round(tokens / self._rate.tokens_per_word))
        pieces = _pieces(asked, f"{self._seed} {number}", parts, self._parts_per_token)
        return " ".join(self._piece(key, count) for key, count in pieces)

    def words(self, count: int, key: str) -> str:
        """Return a prompt of so many words."""
        return self._piece(key, count)

    def _piece(self, key: str, count: int) -> str:
        start, marks = _mark(key, len(WORDS))
        mark = [WORDS[each] for each in marks[:count]]
        rest = count - len(mark)
        if rest <= 0:
            return " ".join(mark)
        rounds, last = divmod(start + rest, TEXT_PARTS)
        text = self._text * rounds + self._text[: self._starts[last]]
        return f"{' '.join(mark)} {text[self._starts[start] : -1]}"


class TokenIdPrompts:
    """Makes prompts of token ids from `low` to `high`, both included."""

    def __init__(self, low: int, high: int, seed: int, scale: float = 1.0) -> None:
        self._low = low
        self._ids = high - low + 1
        self._seed = seed
        self._parts_per_token = scale
        rng = random.Random(TEXT_PARTS)
        self._text = [low + rng.randrange(self._ids) for _ in range(TEXT_PARTS)]

    def prompt(self, number: int, asked: TraceRequest) -> list[int]:
        """Return the prompt of a request with its number in the load."""
        key = f"{self._seed} {number}"
        pieces = _pieces(asked, key, asked.prompt_tokens, self._parts_per_token)
        return [each for piece in pieces for each in self._piece(*piece)]

    def _piece(self, key: str, count: int) -> list[int]:
        start, marks = _mark(key, self._ids)
        mark = [self._low + each for each in marks[:count]]
        rest = count - len(mark)
        rounds, last = divmod(start + rest, TEXT_PARTS)
        return mark + (self._text * rounds + self._text[:last])[start : start + rest]


def _pieces(
    asked: TraceRequest, own_key: str, parts: int, parts_per_token: float
) -> Iterator[tuple[str, int]]:
    """Yield the key and the number of parts of each piece; together they have `parts`."""
    block_parts = asked.block_tokens * parts_per_token
    edges = [min(round(index * block_parts), parts) for index in range(len(asked.blocks) + 1)]
    for block, (first, end) in zip(asked.blocks, pairwise(edges), strict=True):
        if end > first:
            yield f"block {block}", end - first
    if parts > edges[-1]:
        yield f"request {own_key}", parts - edges[-1]


def _mark(key: str, choices: int) -> tuple[int, list[int]]:
    """Return a piece's position in the fixed text, and the numbers that begin it."""
    digest = blake2b(key.encode(), digest_size=4 * MARK_PARTS + 4).digest()
    numbers = [int.from_bytes(digest[at : at + 4]) for at in range(0, len(digest), 4)]
    return numbers[0] % TEXT_PARTS, [each % choices for each in numbers[1:]]
