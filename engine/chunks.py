"""The chunk scheduler: which prompts advance in a step, and by how much.

Pure: no blocks, no tensors, no clock. Prefill workers run it over all admitted prompts; decode
workers run it over the prompts that they compute themselves.

Fairness: the oldest prompt is sure of half the step, so nothing starves; the rest goes to the
shortest remaining prompts, so a short prompt under a long one waits for no more than its own
share (shortest remaining processing time, guarded by age). Unused budget flows back.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


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

    @property
    def remaining(self) -> int:
        return self.total - self.computed


class ChunkScheduler(Generic[Key]):
    """Prompts in order of arrival. `plan` decides, `commit` records what was computed."""

    def __init__(self, step_tokens: int, chunk_tokens: int, block_size: int) -> None:
        self._step_tokens = step_tokens
        self._chunk_tokens = max(chunk_tokens, block_size)  # less would never end on a border
        self._block_size = block_size
        self._prompts: dict[Key, _Progress] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, key: Key, total: int, computed: int) -> None:
        """A prompt of `total` tokens, the first `computed` of which are in its blocks."""
        self._prompts[key] = _Progress(total, computed)

    def remove(self, key: Key) -> None:
        self._prompts.pop(key, None)

    @property
    def remaining_tokens(self) -> int:
        return sum(p.remaining for p in self._prompts.values())

    def plan(self) -> list[Chunk[Key]]:
        """Chunks for one step, at most one per prompt, within the step's token budget.

        A chunk that is not the prompt's last ends on a block border, so that every block it
        touches can be offered.
        """
        if not self._prompts:
            return []
        oldest = next(iter(self._prompts))
        share = self._step_tokens if len(self._prompts) == 1 else self._step_tokens // 2
        spans = {oldest: self._fit(oldest, max(share, self._block_size))}
        budget = self._step_tokens - spans[oldest]
        others = [key for key in self._prompts if key != oldest]
        for key in sorted(others, key=lambda k: self._prompts[k].remaining):
            span = self._fit(key, budget)
            if span <= 0:
                break
            spans[key] = span
            budget -= span
        if budget > 0:
            spans[oldest] = self._fit(oldest, spans[oldest] + budget)
        return [self._chunk(key, span) for key, span in spans.items()]

    def commit(self, chunks: list[Chunk[Key]]) -> None:
        """These chunks are computed. A prompt leaves with its last chunk."""
        for chunk in chunks:
            progress = self._prompts.get(chunk.key)
            if progress is None:
                continue  # cancelled while the step ran
            progress.computed = chunk.end
            if chunk.last:
                del self._prompts[chunk.key]

    def _fit(self, key: Key, budget: int) -> int:
        """The longest span of this prompt within the budget that ends well; 0 if none does."""
        progress = self._prompts[key]
        span = min(progress.remaining, budget, self._chunk_tokens)
        if span < progress.remaining:
            end = (progress.computed + span) // self._block_size * self._block_size
            span = max(0, end - progress.computed)
        return span

    def _chunk(self, key: Key, span: int) -> Chunk[Key]:
        progress = self._prompts[key]
        end = progress.computed + span
        return Chunk(key, progress.computed, end, last=end == progress.total)
