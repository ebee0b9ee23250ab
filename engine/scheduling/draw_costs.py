"""The measured cost of draws, in seconds for each group of sampling rules.

A step is planned, and its time limit set, by its work. The number of tokens does not cover the
draws, which a client controls: several for one prompt, with costly rules. Immutable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from baton.engine.scheduling.batch import AllowedTokens, Draw, StepBatch
from baton.engine.scheduling.token_history import History, history_of
from baton.runtime.sampling import SamplingParams

_ROWS = 4  # measured together, as in a step
_ROUNDS = 3
_BIASES, _LOGPROBS = 1024, 20  # the limits of a request
_PLAIN = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class DrawCosts:
    """Seconds of one greedy draw, and the most that each group of rules adds."""

    greedy_s: float = 0.0
    random_s: float = 0.0  # temperature
    cut_s: float = 0.0  # top-k, top-p or min-p
    adjusted_s: float = 0.0  # penalties or a bias
    logprobs_s: float = 0.0
    masked_s: float = 0.0  # by a grammar; the mask itself is computed beside the device

    def draws_s(self, draws: Iterable[Draw]) -> float:
        """Return the seconds of all `draws`."""
        return sum(self.draw_s(draw.params, masked=draw.allowed is not None) for draw in draws)

    def batch_s(self, batch: StepBatch) -> float:
        """Return the seconds of a batch's draws and prompt scores."""
        draws_s = sum(self.draws_s(item.draws) for item in batch.slices if item.draws)
        scored = sum(len(item.scoring.targets) for item in batch.slices if item.scoring)
        return draws_s + scored * (self.greedy_s + self.logprobs_s)

    def draw_s(self, params: SamplingParams, *, masked: bool) -> float:
        """Return the seconds of one draw with these params."""
        found = self.greedy_s + (self.masked_s if masked else 0.0)
        if params.temperature > 0:
            found += self.random_s
            if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0:
                found += self.cut_s
        if params.logit_bias or params.needs_history:
            found += self.adjusted_s
        if params.top_logprobs is not None:
            found += self.logprobs_s
        return found


ZERO_COSTS = DrawCosts()


def measure_draws(draw: Callable[[Sequence[Draw]], object], vocab: int) -> DrawCosts:
    """Measure `draw`, which draws from any logits of `vocab` tokens; takes tens of milliseconds.
    Each group is measured with the costliest rules that a client may request."""
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
        max(0.0, _seconds(draw, _PLAIN, allowed=_KnownMask(vocab)) - greedy_s),
    )


class _KnownMask:
    """A mask that is computed already and admits every second token."""

    def __init__(self, vocab: int) -> None:
        self._bits = b"\x55" * -(-vocab // 8)

    def bitmask(self) -> bytes:
        return self._bits

    def extended(self, tokens: Sequence[int]) -> _KnownMask:
        return self


def _seconds(
    draw: Callable[[Sequence[Draw]], object],
    params: SamplingParams,
    history: History | None = None,
    allowed: AllowedTokens | None = None,
) -> float:
    """Return the minimum of several rounds, which excludes interruptions."""
    draws = [Draw(0, row, params, history, allowed) for row in range(_ROWS)]
    found = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        draw(draws)
        found = min(found, time.perf_counter() - began)
    return found / _ROWS
