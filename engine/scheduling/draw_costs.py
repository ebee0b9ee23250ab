"""What draws cost, in seconds by the kinds of their rules: measured where they are made.

A step is judged, and planned, by what it computes; tokens say nothing of its draws, which a client
chooses: several for one prompt, by dear rules. Immutable; knows no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from baton.engine.scheduling.batch import Draw, StepBatch
from baton.engine.scheduling.token_history import History, history_of
from baton.runtime.sampling import SamplingParams

_ROWS = 4  # measured at once: a step has few or many, and threads share them
_ROUNDS = 3
_BIASES, _LOGPROBS = 1024, 20  # the most that a request may ask for
_PLAIN = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class DrawCosts:
    """Seconds of one draw: of the highest logit, and what each kind of rule adds at most."""

    greedy_s: float = 0.0
    random_s: float = 0.0  # by a temperature
    cut_s: float = 0.0  # by top-k, top-p or min-p besides
    adjusted_s: float = 0.0  # by penalties or a bias
    logprobs_s: float = 0.0

    def of(self, draws: Iterable[Draw]) -> float:
        """Seconds of all of them."""
        return sum(self.by(draw.params) for draw in draws)

    def of_batch(self, batch: StepBatch) -> float:
        draws_s = sum(self.of(piece.draws) for piece in batch.slices if piece.draws)
        scored = sum(len(piece.scoring.targets) for piece in batch.slices if piece.scoring)
        return draws_s + scored * (self.greedy_s + self.logprobs_s)

    def by(self, params: SamplingParams) -> float:
        """Seconds of one draw by these rules."""
        found = self.greedy_s
        if params.temperature > 0:
            found += self.random_s
            if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0:
                found += self.cut_s
        if params.logit_bias or params.needs_history:
            found += self.adjusted_s
        if params.top_logprobs is not None:
            found += self.logprobs_s
        return found


FREE = DrawCosts()


def measure_draws(draw: Callable[[Sequence[Draw]], object], vocab: int) -> DrawCosts:
    """Costs of `draw`, which draws from any logits of `vocab` tokens: some tens of milliseconds.
    The dearest rules of each kind are taken, as a client may."""
    bias = tuple((token, 0.5) for token in range(min(vocab, _BIASES)))
    adjusted = replace(
        _PLAIN, logit_bias=bias, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1
    )
    greedy_s = _seconds(draw, _PLAIN)
    random_s = _seconds(draw, SamplingParams(temperature=2.0))
    cut = SamplingParams(temperature=2.0, top_k=max(vocab - 1, 1), top_p=0.9999)
    return DrawCosts(
        greedy_s,
        max(0.0, random_s - greedy_s),
        max(0.0, _seconds(draw, cut) - random_s),
        max(0.0, _seconds(draw, adjusted, history_of(range(vocab), vocab // 2)) - greedy_s),
        max(0.0, _seconds(draw, replace(_PLAIN, top_logprobs=min(vocab, _LOGPROBS))) - greedy_s),
    )


def _seconds(
    draw: Callable[[Sequence[Draw]], object], params: SamplingParams, history: History | None = None
) -> float:
    """The least of some rounds: what came in between is not the draws'."""
    draws = [Draw(0, row, params, history) for row in range(_ROWS)]
    found = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        draw(draws)
        found = min(found, time.perf_counter() - began)
    return found / _ROWS
