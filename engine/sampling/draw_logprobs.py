"""Logprobs of drawn tokens and of the most likely ones, as a device returns them to the host.

Knows no kernel. Keeps no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.sampling.draw_adjustments import FORBIDDEN_TOKEN_BIAS
from baton.engine.scheduling.batch import Draw, Drawn
from baton.runtime.sampling import MAX_LOGPROBS

LOGPROB_COLUMNS = MAX_LOGPROBS + 1  # the drawn token, then the most likely ones


@dataclass(frozen=True, slots=True)
class LogprobBuffers:
    """The buffers that a kernel writes. Column 0 holds the drawn token, the others the most likely
    tokens, best first; rows and columns that no draw requests are not written."""

    tokens: Tensor  # int32 [rows, LOGPROB_COLUMNS]; column 0 is unused
    values: Tensor  # float32 [rows, LOGPROB_COLUMNS]

    @staticmethod
    def on(device: torch.device, rows: int) -> LogprobBuffers:
        shape = (rows, LOGPROB_COLUMNS)
        return LogprobBuffers(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
        )

    def to(self, device: torch.device) -> LogprobBuffers:
        return LogprobBuffers(self.tokens.to(device), self.values.to(device))

    def copy_from(self, other: LogprobBuffers) -> None:
        """Queue an asynchronous copy."""
        self.tokens.copy_(other.tokens, non_blocking=True)
        self.values.copy_(other.values, non_blocking=True)


def logprob_counts(draws: Sequence[Draw | None], vocab: int) -> list[int]:
    """Return how many most likely tokens each draw requests; -1: no logprobs."""
    requested = [None if draw is None else draw.params.top_logprobs for draw in draws]
    return [-1 if top is None else min(top, vocab, MAX_LOGPROBS) for top in requested]


def drawn_with_logprobs(
    draw: Draw, token: int, count: int, row: int, buffers: LogprobBuffers
) -> Drawn:
    """Build the `Drawn` of `draw`. `buffers`, on the CPU, have its logprobs in `row` where `count`,
    from `logprob_counts`, is not negative."""
    if count < 0:
        return Drawn(draw.choice, token)
    own, *values = map(_logprob, buffers.values[row, : count + 1].tolist())
    best = buffers.tokens[row, 1 : count + 1].tolist()
    return Drawn(draw.choice, token, own, tuple(zip(best, values, strict=True)))


def _logprob(value: float) -> float:
    """Return minus infinity for a forbidden token, as the CPU sampler does."""
    return value if value > FORBIDDEN_TOKEN_BIAS / 2 else -math.inf
