"""The chunk scheduler: which prompts advance in a step, and by how much.

Pure: no blocks, no tensors, no clock. Prefill workers run it over all admitted prompts; decode
workers run it over the prompts that they compute themselves.

The next step may be planned while one runs: a chunk begins where the one planned before it ends.

Fairness: the oldest prompt is sure of half the step, so nothing starves; the rest goes to the
shortest remaining prompts, so a short prompt under a long one waits for no more than its own
share (shortest remaining processing time, guarded by age). Unused budget flows back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

SCORED_CHUNK_TOKENS = 64
Key = TypeVar("Key", bound=Hashable)


def _any(_: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Chunk(Generic[Key]):
    """Tokens [start, end) of a prompt, computed in one step."""

    key: Key
    start: int
    end: int
    last: bool


@dataclass(slots=True)
class _Progress:
    total: int
    computed: int
    planned: int  # computed, or in a chunk that is under way
    most: int  # tokens of one chunk
    draws_s: float  # what the draws of its last chunk take

    @property
    def unplanned(self) -> int:
        return self.total - self.planned


class ChunkScheduler(Generic[Key]):
    """Prompts in order of arrival. `plan` decides; of each chunk `commit` records that
    it was computed, or `cut` that it is to be planned again."""

    def __init__(self, step_tokens: int, chunk_tokens: int, block_size: int) -> None:
        self._step_tokens = step_tokens
        self._chunk_tokens = max(chunk_tokens, block_size)  # less would never end on a border
        self._block_size = block_size
        self._prompts: dict[Key, _Progress] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(
        self, key: Key, total: int, computed: int, draws_s: float = 0.0, *, scored: bool = False
    ) -> None:
        """A prompt of `total` tokens, the first `computed` of which are in its blocks; its last
        chunk has draws that take `draws_s`. `scored`: each token has logits, so that few are
        computed at once."""
        most = self._chunk_tokens
        if scored:
            most = max(self._block_size, min(most, SCORED_CHUNK_TOKENS))
        self._prompts[key] = _Progress(total, computed, computed, most, draws_s)

    def remove(self, key: Key) -> None:
        self._prompts.pop(key, None)

    def computed(self, key: Key) -> int:
        """Leading tokens of this prompt that are in its blocks."""
        return self._prompts[key].computed

    @property
    def remaining_tokens(self) -> int:
        return sum(p.total - p.computed for p in self._prompts.values())

    def unplanned(self, key: Key) -> int:
        """Tokens of this prompt that are neither computed nor under way; 0 if it is not here."""
        progress = self._prompts.get(key)
        return 0 if progress is None else progress.unplanned

    def plan(
        self, tokens_per_s: float = 0.0, among: Callable[[Key], bool] = _any
    ) -> list[Chunk[Key]]:
        """Chunks for one step, at most one per prompt `among` those here, within the step's token
        budget. A last chunk's draws count as the tokens that fit into the same time; those of
        the oldest prompt alone may exceed the budget.

        A chunk that is not the prompt's last ends on a block border, so that every block it
        touches can be offered.
        """
        left = {key: p.unplanned for key, p in self._prompts.items() if p.unplanned and among(key)}
        if not left:
            return []
        oldest = next(iter(left))
        share = self._step_tokens if len(left) == 1 else self._step_tokens // 2
        spans = {oldest: self._fit(oldest, max(share, self._block_size))}
        drawn = self._drawn(oldest, spans[oldest], tokens_per_s)
        budget = self._step_tokens - spans[oldest] - drawn
        others = [key for key in left if key != oldest]
        for key in sorted(others, key=left.__getitem__):
            if budget <= 0:
                break
            span = self._fit(key, budget)
            if span + self._drawn(key, span, tokens_per_s) > budget:
                span = self._fit_without_end(key, span)
            if span > 0:
                spans[key] = span
                budget -= span + self._drawn(key, span, tokens_per_s)
        if budget > 0:
            spans[oldest] = self._fit(oldest, spans[oldest] + budget)
        return [self._chunk(key, span) for key, span in spans.items()]

    def follows(self, chunk: Chunk[Key]) -> bool:
        """Whether what this chunk was computed after is there: not so if its prompt was removed,
        or a chunk before it was cut while this one was under way."""
        progress = self._prompts.get(chunk.key)
        return progress is not None and progress.computed == chunk.start

    def commit(self, chunk: Chunk[Key]) -> None:
        """A chunk that `follows` is computed. A prompt leaves with its last chunk."""
        self._prompts[chunk.key].computed = chunk.end
        if chunk.last:
            del self._prompts[chunk.key]

    def cut(self, chunk: Chunk[Key]) -> bool:
        """A chunk that `follows` did not fit into the device's memory: its tokens are planned
        again, and from now on at most half as many at once. False if they are one block."""
        tokens = chunk.end - chunk.start
        if tokens <= self._block_size:
            return False
        progress = self._prompts[chunk.key]
        progress.planned = progress.computed
        progress.most = max(self._block_size, tokens // 2)
        return True

    def _fit(self, key: Key, budget: int) -> int:
        """The longest span of this prompt within the budget that ends well; 0 if none does."""
        progress = self._prompts[key]
        span = min(progress.unplanned, budget, progress.most)
        if span < progress.unplanned:
            end = (progress.planned + span) // self._block_size * self._block_size
            span = max(0, end - progress.planned)
        return span

    def _fit_without_end(self, key: Key, span: int) -> int:
        """The longest span shorter than this last one: its draws are for another step."""
        progress = self._prompts[key]
        end = (progress.planned + span - 1) // self._block_size * self._block_size
        return max(0, end - progress.planned)

    def _drawn(self, key: Key, span: int, tokens_per_s: float) -> int:
        """What the draws at the end of this span cost, in tokens."""
        progress = self._prompts[key]
        last = span == progress.unplanned
        return math.ceil(progress.draws_s * tokens_per_s) if last else 0

    def _chunk(self, key: Key, span: int) -> Chunk[Key]:
        progress = self._prompts[key]
        start, progress.planned = progress.planned, progress.planned + span
        return Chunk(key, start, progress.planned, last=progress.planned == progress.total)
