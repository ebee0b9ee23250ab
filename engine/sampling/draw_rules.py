"""The sampling rules of a step's rows, as tensors.

For devices that draw without the host. `draw_adjustments` has the penalties and biases applied
before, `draw_logprobs` the logprobs computed after. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.sampling.noise import stream_start
from baton.engine.sampling.sampling import GREEDY_TEMPERATURE
from baton.engine.scheduling.batch import Draw
from baton.runtime.sampling import SamplingParams

_GREEDY = Draw(0, 0, SamplingParams(temperature=0.0))


@dataclass(frozen=True, slots=True)
class DrawRules:
    """The sampling rules of each row; tensors [rows] on one device. A value that is kept in a wider
    dtype is rounded to the dtype named here."""

    inverse_temperature: Tensor  # float32; 0: greedy
    top_k: Tensor  # int32; 0: off
    top_p: Tensor  # float64; 1: off
    log_min_p: Tensor  # float32; minus infinity: off
    start: Tensor  # int64: bits of `stream_start`
    position: Tensor  # int64: absolute position of the token to be drawn

    @staticmethod
    def of(draws: Sequence[Draw | None]) -> DrawRules:
        """Build the rules of `draws` on the CPU; None draws greedily."""
        known = [draw or _GREEDY for draw in draws]
        params = [draw.params for draw in known]
        starts = [_signed(stream_start(draw.params.seed, draw.choice)) for draw in known]
        return DrawRules(
            torch.tensor(
                [1 / p.temperature if p.temperature > GREEDY_TEMPERATURE else 0.0 for p in params],
                dtype=torch.float32,
            ),
            torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int32),
            torch.tensor([p.top_p for p in params], dtype=torch.float64),
            torch.tensor([p.min_p for p in params], dtype=torch.float32).log(),
            torch.tensor(starts, dtype=torch.int64),
            torch.tensor([draw.position for draw in known], dtype=torch.int64),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.inverse_temperature,
            self.top_k,
            self.top_p,
            self.log_min_p,
            self.start,
            self.position,
        )

    def to(self, device: torch.device) -> DrawRules:
        return DrawRules(*(tensor.to(device) for tensor in self.tensors()))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
