"""Logprobs of drawn tokens and of the best ones, as a device leaves them for the host.

Knows no kernel. Keeps no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.sampling.draw_adjustments import BARRED_BIAS
from baton.engine.scheduling.batch import Draw, Drawn
from baton.runtime.sampling import MAX_LOGPROBS

LOGPROB_COLUMNS = MAX_LOGPROBS + 1  # the drawn token's, then the best ones'


@dataclass(frozen=True, slots=True)
class LogprobRoom:
    """Where a kernel writes them. Column 0 is the drawn token's, the others are the best tokens',
    best first; rows and columns that nothing asks for are left alone."""

    tokens: Tensor  # int32 [rows, LOGPROB_COLUMNS]; column 0 is unused
    values: Tensor  # float32 [rows, LOGPROB_COLUMNS]

    @staticmethod
    def on(device: torch.device, rows: int) -> LogprobRoom:
        shape = (rows, LOGPROB_COLUMNS)
        return LogprobRoom(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
        )

    def to(self, device: torch.device) -> LogprobRoom:
        return LogprobRoom(self.tokens.to(device), self.values.to(device))

    def copy_from(self, other: LogprobRoom) -> None:
        """Queue a copy; nothing waits for it."""
        self.tokens.copy_(other.tokens, non_blocking=True)
        self.values.copy_(other.values, non_blocking=True)


def logprob_counts(draws: Sequence[Draw | None], vocab: int) -> list[int]:
    """Return how many best tokens each draw asks for; -1: no logprobs at all."""
    asked = [None if draw is None else draw.params.top_logprobs for draw in draws]
    return [-1 if top is None else min(top, vocab, MAX_LOGPROBS) for top in asked]


def with_logprobs(draw: Draw, token: int, count: int, row: int, room: LogprobRoom) -> Drawn:
    """Put together what `draw` drew; `room`, on the CPU, has its logprobs in `row` where `count`,
    of `logprob_counts`, is not negative."""
    if count < 0:
        return Drawn(draw.choice, token)
    own, *values = map(_logprob, room.values[row, : count + 1].tolist())
    best = room.tokens[row, 1 : count + 1].tolist()
    return Drawn(draw.choice, token, own, tuple(zip(best, values, strict=True)))


def _logprob(value: float) -> float:
    """Minus infinity for a token that must not be drawn, as on a CPU."""
    return value if value > BARRED_BIAS / 2 else -math.inf
