"""The costs of work on workers that are alike: the times of a model, in microseconds.

    compute    tokens of a prompt, in chunks; or all that is queued
    delay      of each sequence that is decoded in the steps of a prompt
    miss       what such a delay takes from the chance of a sequence to meet its objective
    batch      a request among other sequences: what they delay it, and what it delays them
    credit     a token of KV that has no room: it waits for another request's end
    move       the READs of a handoff, most of which are hidden behind the prefill

Whole microseconds compare exactly, so equal workers stay equal. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from baton.planner.live_timing import PRIOR
from baton.planner.timing_model import StepWork, TimingModel
from baton.runtime.config import StepConfig
from baton.runtime.worker.attention_pairs import causal_pairs

US = 1e6
_STEP = StepConfig()
HIDDEN_SHARE = 0.1  # of the cost of READs that delay nothing themselves
FULL_POOL_TOKENS = 1024  # of a sequence, where a pool is full
# Of an objective, so much counts as left at least: else all prompts cost the same on a worker whose
# streams miss it without them.
LEAST_LEFT = 0.1


class Pair(NamedTuple):
    """Two workers of which one READs from the other: its measured speed if that is low, 0.0
    otherwise; and how far they are apart, None for any two."""

    gb_per_s: float = 0.0
    distance: int | None = None


ANY_PAIR = Pair()
NEAREST_PAIR = Pair(distance=0)


@dataclass(frozen=True, slots=True, eq=False)
class WorkerCosts:
    """Workers of one role and model whose steps take `pace` times as long as `timing` says.
    `step_tokens` and `chunk_tokens`: prompt tokens in a step, and of one prompt; `growth_tokens`:
    output that is expected of a sequence; `itl_s`: the objective for its mean time between two
    tokens. Two objects are never equal: workers of one group have the same object."""

    timing: TimingModel = PRIOR
    pace: float = 1.0
    step_tokens: int = _STEP.prefill_tokens
    chunk_tokens: int = _STEP.chunk_tokens
    growth_tokens: int = _STEP.expected_growth_tokens
    byte_s: tuple[float, ...] = ()  # of READs by distance (topology.py); empty: as `timing` says
    itl_s: float = math.inf

    def compute_us(self, first: int, end: int) -> int:
        """Return the time of the steps that compute the tokens [first, end) of a prompt."""
        return self._steps_us(end - first, causal_pairs(first, end), self.chunk_tokens)

    def queue_us(self, tokens: int, pairs: int) -> int:
        """Return the time of the steps that compute all prompts of a queue."""
        return self._steps_us(tokens, pairs, self.step_tokens)

    @property
    def step_us(self) -> int:
        """Return the time of one whole step of prompts."""
        return self._steps_us(self.step_tokens, 0, self.step_tokens)

    def delay_us(self, first: int, end: int) -> int:
        """Return how much `compute_us` delays each sequence that is decoded in these steps: by what
        they take longer than steps without a prompt."""
        timing, tokens = self.timing, end - first
        longer_s = max(0.0, timing.chunk.fixed_s - timing.step.fixed_s)
        seconds = (
            -(-tokens // self.chunk_tokens) * longer_s
            + timing.chunk.per_token_s * tokens
            + timing.attention.per_pair_s * causal_pairs(first, end)
        )
        return round(US * self.pace * seconds)

    def miss_us(self, delay_us: int, longest_us: int, sequences: int, context_tokens: int) -> int:
        """Return what a sequence of such a batch loses of its objective to a delay, of which
        `longest_us` are in one step: nothing if that step takes no longer than the objective. Else
        the sequence misses it if too few tokens follow: the delay is a share of what the steps of
        the output that is expected of it leave of the objective. With that chance all the time that
        the objective gives to this output was wasted."""
        left_us = self._left_us(sequences, context_tokens)
        if longest_us <= left_us:
            return 0
        objective_us = US * self.itl_s
        chance = delay_us / (self.growth_tokens * max(left_us, LEAST_LEFT * objective_us))
        return round(min(1.0, chance) * self.growth_tokens * objective_us)

    def bears(self, longest_us: int, sequences: int, context_tokens: int) -> bool:
        """Return whether there is an objective, which steps of such a batch meet though they are
        longer by `longest_us`: then no sequence misses it, however many such steps follow."""
        return math.isfinite(self.itl_s) and longest_us <= self._left_us(sequences, context_tokens)

    def batch_us(self, sequences: int, context_tokens: int) -> int:
        """Return the cost of a request beside `sequences` with `context_tokens` of KV: over the
        output that is expected of it, they delay it, and it delays them by as much."""
        timing = self.timing
        per_token_s = (
            timing.step.per_sequence_s * sequences
            + timing.attention.per_context_token_s * context_tokens
        )
        return round(US * self.pace * 2 * self.growth_tokens * per_token_s)

    def credit_us(self, pool_tokens: int) -> int:
        """Return the cost of a token without room in a pool: while the sequences of a full pool
        produce the output that is expected of one, its content is replaced once."""
        return _credit_us(self, pool_tokens)

    @property
    def handoff_us(self) -> int:
        """Return the time of a handoff beyond its prefill and its READs."""
        return round(US * self.timing.transfer.fixed_s)

    def read_us(self, tokens: int, pair: Pair = ANY_PAIR) -> int:
        """Return the time of READing tokens by this pair of workers."""
        return round(US * self._byte_s(pair) * self.timing.kv_bytes_per_token * tokens)

    def move_us(self, tokens: int, compute_us: int, pair: Pair = ANY_PAIR) -> int:
        """Return the cost of READING `tokens` from this prefill worker: the time that its
        computation does not hide, which is that of the last chunk at least, and a share of the
        rest: for so long the link is not another request's."""
        all_us = self.read_us(tokens, pair)
        last_us = self.read_us(min(tokens, self.chunk_tokens), pair)
        exposed_us = max(last_us, all_us - compute_us)
        return exposed_us + round(HIDDEN_SHARE * (all_us - exposed_us))

    def _left_us(self, sequences: int, context_tokens: int) -> float:
        """Return what a step of such a batch leaves of the objective for a token."""
        work = StepWork(sequences=sequences, context_tokens=context_tokens)
        return US * (self.itl_s - self.pace * self.timing.step_s(work))

    def _byte_s(self, pair: Pair) -> float:
        usual_s = self.timing.transfer.per_byte_s
        if pair.gb_per_s:  # never quicker than the nearest workers
            return max(1e-9 / pair.gb_per_s, self.byte_s[0] if self.byte_s else usual_s)
        if pair.distance is None or not self.byte_s:
            return usual_s
        return self.byte_s[pair.distance]

    def _steps_us(self, tokens: int, pairs: int, step_tokens: int) -> int:
        timing = self.timing
        seconds = (
            -(-tokens // step_tokens) * timing.chunk.fixed_s
            + timing.chunk.per_token_s * tokens
            + timing.attention.per_pair_s * pairs
        )
        return round(US * self.pace * seconds)


@lru_cache(maxsize=256)  # each view of the workers of a group asks for it
def _credit_us(costs: WorkerCosts, pool_tokens: int) -> int:
    timing = costs.timing
    step_s = (
        timing.step.fixed_s
        + timing.step.per_sequence_s * pool_tokens / FULL_POOL_TOKENS
        + timing.attention.per_context_token_s * pool_tokens
    )
    lifetime_s = costs.growth_tokens * costs.pace * step_s
    return max(1, round(US * lifetime_s / max(1, pool_tokens)))


PRIOR_COSTS = WorkerCosts()
