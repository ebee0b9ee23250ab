"""The token history that penalties count: the tokens of a choice, and views of them without copies.

    event loop:     output.append(token)                          history = text.until(known)
    device thread:  history.counts(): the tokens since the last draw are counted, and only these

A `Text` lives as long as its choice, independent of its blocks, so that the cost of a draw depends
on the new tokens alone. Its owner only appends; a draw reads no further than its view. Tokens that
a view adds may be proposals that the target rejects: they are counted last, and removed where the
next view does not have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class PromptTokens:
    """A prompt, shared by its choices. `distinct` is computed on first use."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._distinct: Ints | None = None

    @property
    def distinct(self) -> Ints:
        """Return the distinct tokens, sorted."""
        if self._distinct is None:
            self._distinct = np.unique(np.asarray(self.tokens, dtype=np.int64))
        return self._distinct


class TokenCounts:
    """Counts of each token in the first `total` tokens of an output; used by the device thread."""

    def __init__(self, prompt: PromptTokens, output: Sequence[int]) -> None:
        self.total = len(output)
        self.tokens, self.counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
        self.fresh = np.setdiff1d(
            self.tokens, prompt.distinct, assume_unique=True
        )  # not in the prompt
        self._prompt = prompt

    def add(self, token: int) -> None:
        """Count one token more."""
        self.total += 1
        index = int(np.searchsorted(self.tokens, token))
        if _holds(self.tokens, index, token):
            self.counts[index] += 1
            return
        self.tokens = np.insert(self.tokens, index, token)
        self.counts = np.insert(self.counts, index, 1)
        distinct = self._prompt.distinct
        if not _holds(distinct, int(np.searchsorted(distinct, token)), token):
            self.fresh = np.append(self.fresh, token)

    def remove(self, token: int) -> None:
        """Uncount the token that was added last."""
        self.total -= 1
        index = int(np.searchsorted(self.tokens, token))
        self.counts[index] -= 1
        if self.counts[index]:
            return
        self.tokens, self.counts = np.delete(self.tokens, index), np.delete(self.counts, index)
        if len(self.fresh) and int(self.fresh[-1]) == token:
            self.fresh = self.fresh[:-1]


class Text:
    """Prompt and output of one choice. The owner appends to its list `output`."""

    def __init__(self, prompt: PromptTokens, output: list[int]) -> None:
        self.prompt, self.output = prompt, output
        self._counts: TokenCounts | None = None
        self._pending: list[int] = []  # counted last: the owner may never have them

    def until(self, known: int) -> History:
        """Return a view that ends after `known` tokens of output."""
        return History(self, known)

    def counted(self, known: int, pending: Sequence[int]) -> TokenCounts:
        """Return the counts of the first `known` tokens of output and of `pending`. A step that
        runs again, in parts, counts no token twice; a view older than the counts is rare."""
        found = self._counts
        if found is None or found.total - len(self._pending) > known:
            found = self._counts = TokenCounts(self.prompt, self.output[:known])
            self._pending = []
        kept = found.total - len(self._pending)
        wanted = [*self.output[kept:known], *pending]
        same = 0
        for old, new in zip(self._pending, wanted, strict=False):
            if old != new:
                break
            same += 1
        for token in reversed(self._pending[same:]):
            found.remove(token)
        for token in wanted[same:]:
            found.add(token)
        self._pending = wanted[known - kept :]
        return found


@dataclass(frozen=True, slots=True)
class History:
    """A prompt and the first `known` tokens of its output. `pending`: tokens that follow them and
    that the owner does not have: drawn by a step whose result is outstanding, or proposed."""

    text: Text
    known: int
    pending: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.prompt_tokens + self.known + len(self.pending)

    def __iter__(self) -> Iterator[int]:
        yield from self.text.prompt.tokens
        yield from islice(self.text.output, self.known)
        yield from self.pending

    @property
    def prompt_tokens(self) -> int:
        return len(self.text.prompt.tokens)

    def extended(self, token: int) -> History:
        return History(self.text, self.known, (*self.pending, token))

    def counts(self) -> TokenCounts:
        """Return the counts of the output; valid until the text is counted further."""
        return self.text.counted(self.known, self.pending)


def history_of(tokens: Sequence[int], prompt_tokens: int) -> History:
    """Return the history of a complete token list."""
    output = list(tokens[prompt_tokens:])
    return Text(PromptTokens(tokens[:prompt_tokens]), output).until(len(output))


def _holds(tokens: Ints, index: int, token: int) -> bool:
    return index < len(tokens) and int(tokens[index]) == token
