"""The tokens that penalties count, without copying them: a choice's text, and views of it.

    event loop:     output.append(token)                          history = text.until(known)
    device thread:  history.counts(): the tokens since the last draw are counted, no others

A `Text` lives as long as its choice, whatever becomes of its blocks, so a draw costs what is new,
not what is known. Its owner only appends; who draws reads no further than a view reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class PromptTokens:
    """A prompt, shared by its choices. `distinct` is made when it is first asked for."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._distinct: Ints | None = None

    @property
    def distinct(self) -> Ints:
        """Its tokens, each once, in order."""
        if self._distinct is None:
            self._distinct = np.unique(np.asarray(self.tokens, dtype=np.int64))
        return self._distinct


class TokenCounts:
    """How often each token is in the first `total` tokens of an output. The device thread's."""

    def __init__(self, prompt: PromptTokens, output: Sequence[int]) -> None:
        self.total = len(output)
        self.tokens, self.counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
        self.fresh = np.setdiff1d(self.tokens, prompt.distinct, assume_unique=True)  # not in it
        self._prompt = prompt

    def add(self, token: int) -> None:
        self.total += 1
        place = int(np.searchsorted(self.tokens, token))
        if _holds(self.tokens, place, token):
            self.counts[place] += 1
            return
        self.tokens = np.insert(self.tokens, place, token)
        self.counts = np.insert(self.counts, place, 1)
        distinct = self._prompt.distinct
        if not _holds(distinct, int(np.searchsorted(distinct, token)), token):
            self.fresh = np.append(self.fresh, token)


class Text:
    """Prompt and output of one choice. `output` is its owner's list, to which it appends."""

    def __init__(self, prompt: PromptTokens, output: list[int]) -> None:
        self.prompt, self.output = prompt, output
        self._counts: TokenCounts | None = None

    def until(self, known: int) -> History:
        """A view that ends after `known` tokens of output."""
        return History(self, known)

    def counted(self, known: int, fed: Sequence[int]) -> TokenCounts:
        """Counts of the first `known` tokens of output and then `fed`. A step that is run a second
        time, in parts, counts nothing twice; one that is older than what was counted is rare."""
        found, total = self._counts, known + len(fed)
        if found is None or found.total > total:
            found = self._counts = TokenCounts(self.prompt, self.output[:known])
        for token in islice(self.output, found.total, known):
            found.add(token)
        for token in fed[found.total - known :]:
            found.add(token)
        return found


@dataclass(frozen=True, slots=True)
class History:
    """The first `known` tokens of a text's output, and the prompt before them. `fed`: drawn by a
    step that its owner has not heard of yet."""

    text: Text
    known: int
    fed: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.prompt_tokens + self.known + len(self.fed)

    def __iter__(self) -> Iterator[int]:
        yield from self.text.prompt.tokens
        yield from islice(self.text.output, self.known)
        yield from self.fed

    @property
    def prompt_tokens(self) -> int:
        return len(self.text.prompt.tokens)

    def continued(self, token: int) -> History:
        return History(self.text, self.known, (*self.fed, token))

    def counts(self) -> TokenCounts:
        """Of the output; valid until the text is counted further."""
        return self.text.counted(self.known, self.fed)


def history_of(tokens: Sequence[int], prompt_tokens: int) -> History:
    """Of a text that is known as a whole."""
    output = list(tokens[prompt_tokens:])
    return Text(PromptTokens(tokens[:prompt_tokens]), output).until(len(output))


def _holds(tokens: Ints, place: int, token: int) -> bool:
    return place < len(tokens) and int(tokens[place]) == token
