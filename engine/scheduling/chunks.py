"""The chunk scheduler: which prompts advance in a step, and by how much.

Pure: no blocks, no tensors, no clock. A prefill worker runs it over all admitted prompts, a
decode worker over the prompts that it computes itself.

The next step may be planned while one runs: a chunk begins where the one planned before it ends.

Order: the prompt with the least work left goes first, and the next ones get what it leaves of the
step, so that prompts of a burst end one after the other (Schrage's shortest remaining processing
time, Operations Research 16(3), 1968). Fairness: a prompt ages. Its rank is its work left plus
AGEING times the tokens that had been planned when it came, so one of n tokens is passed only by
prompts that come before n / AGEING more tokens are planned; no prompt starves. (The end of a step
that is less than a block goes to any prompt that it completes.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.runtime.worker.attention_pairs import causal_pairs

SCORED_CHUNK_TOKENS = 64
AGEING = 1 / 8  # rank, in tokens left, of a token that was planned before a prompt came
Key = TypeVar("Key", bound=Hashable)


def _every_prompt(_: object) -> bool:
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
    planned: int  # computed, or in a running chunk
    max_chunk: int  # tokens
    draws_s: float  # of its last chunk
    came_at: int  # tokens planned before it came

    @property
    def unplanned(self) -> int:
        return self.total - self.planned


class ChunkScheduler(Generic[Key]):
    """The prompts, in order of arrival. `plan` chooses chunks; `commit` records that a chunk was
    computed, `cut` that it must be planned again."""

    def __init__(self, step_tokens: int, chunk_tokens: int, block_size: int) -> None:
        self._step_tokens = step_tokens
        self._chunk_tokens = max(chunk_tokens, block_size)  # less never ends on a block border
        self._block_size = block_size
        self._prompts: dict[Key, _Progress] = {}
        self._planned_tokens = 0  # so far, of all prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def add(
        self, key: Key, total: int, computed: int, draws_s: float = 0.0, *, scored: bool = False
    ) -> None:
        """Add a prompt of `total` tokens, the first `computed` of which are in its blocks; the
        draws of its last chunk take `draws_s`. `scored`: each token has logits, so chunks are
        short."""
        max_chunk = self._chunk_tokens
        if scored:
            max_chunk = max(self._block_size, min(max_chunk, SCORED_CHUNK_TOKENS))
        self._prompts[key] = _Progress(
            total, computed, computed, max_chunk, draws_s, self._planned_tokens
        )

    def remove(self, key: Key) -> None:
        self._prompts.pop(key, None)

    def computed(self, key: Key) -> int:
        """Return how many leading tokens of this prompt are in its blocks."""
        return self._prompts[key].computed

    @property
    def remaining_tokens(self) -> int:
        return sum(p.total - p.computed for p in self._prompts.values())

    @property
    def remaining_pairs(self) -> int:
        """Count the query-key pairs of the attention of the remaining tokens."""
        return sum(causal_pairs(p.computed, p.total) for p in self._prompts.values())

    def unplanned(self, key: Key) -> int:
        """Return how many tokens are neither computed nor running; 0 for an unknown prompt."""
        progress = self._prompts.get(key)
        return 0 if progress is None else progress.unplanned

    def plan(
        self, tokens_per_s: float = 0.0, among: Callable[[Key], bool] = _every_prompt
    ) -> list[Chunk[Key]]:
        """Plan the chunks of one step, at most one for each prompt that `among` accepts, within the
        step's token budget. The draws of a last chunk count as the tokens that would take the same
        time; only those of the first prompt may exceed the budget.

        A chunk that is not the prompt's last ends on a block border, so that every block that it
        writes can be offered.
        """
        budget = self._step_tokens
        chunks: list[Chunk[Key]] = []
        for key in self._ranked(tokens_per_s, among):
            if budget <= 0:
                break
            span = self._fit(key, budget if chunks else max(budget, self._block_size))
            drawn = self._draw_tokens(key, span, tokens_per_s)
            if chunks and span + drawn > budget:
                span, drawn = self._fit_without_end(key, span), 0
            if span > 0:
                chunks.append(self._chunk(key, span))
                budget -= span + drawn
        return chunks

    def follows(self, chunk: Chunk[Key]) -> bool:
        """Return whether the tokens before this chunk are computed: not if its prompt was removed
        or an earlier chunk was cut while this one ran."""
        progress = self._prompts.get(chunk.key)
        return progress is not None and progress.computed == chunk.start

    def commit(self, chunk: Chunk[Key]) -> None:
        """Record that a chunk that `follows` was computed; its last chunk removes the prompt."""
        self._prompts[chunk.key].computed = chunk.end
        if chunk.last:
            del self._prompts[chunk.key]

    def cut(self, chunk: Chunk[Key]) -> bool:
        """Record that a chunk that `follows` did not fit into device memory: its tokens are planned
        again, at most half as many at once. Returns False if the chunk is one block."""
        tokens = chunk.end - chunk.start
        if tokens <= self._block_size:
            return False
        progress = self._prompts[chunk.key]
        progress.planned = progress.computed
        progress.max_chunk = max(self._block_size, tokens // 2)
        return True

    def _ranked(self, tokens_per_s: float, among: Callable[[Key], bool]) -> list[Key]:
        """Return the prompts that have tokens to plan, the next one first."""
        ranks = {
            key: p.unplanned + p.draws_s * tokens_per_s + AGEING * p.came_at
            for key, p in self._prompts.items()
            if p.unplanned and among(key)
        }
        return sorted(ranks, key=ranks.__getitem__)

    def _fit(self, key: Key, budget: int) -> int:
        """Return the longest span within the budget that ends on a block border or at the end."""
        progress = self._prompts[key]
        span = min(progress.unplanned, budget, progress.max_chunk)
        if span < progress.unplanned:
            end = (progress.planned + span) // self._block_size * self._block_size
            span = max(0, end - progress.planned)
        return span

    def _fit_without_end(self, key: Key, span: int) -> int:
        """Return the longest span shorter than this last one, whose draws wait for another step."""
        progress = self._prompts[key]
        end = (progress.planned + span - 1) // self._block_size * self._block_size
        return max(0, end - progress.planned)

    def _draw_tokens(self, key: Key, span: int, tokens_per_s: float) -> int:
        """Return the cost of the draws at the end of this span, in tokens."""
        progress = self._prompts[key]
        last = span == progress.unplanned
        return math.ceil(progress.draws_s * tokens_per_s) if last else 0

    def _chunk(self, key: Key, span: int) -> Chunk[Key]:
        progress = self._prompts[key]
        start, progress.planned = progress.planned, progress.planned + span
        self._planned_tokens += span
        return Chunk(key, start, progress.planned, last=progress.planned == progress.total)
