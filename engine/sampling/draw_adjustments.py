"""Penalties and biases of a step's draws as lists of tokens, for devices that apply them.

    row r:   bounds[0]        bounds[1]          bounds[2]          bounds[3]
                 │ seen tokens    │ output's counts   │ biased tokens    │

Only rows that ask for some have entries, so only they cost anything. Lists are made from the counts
that each text keeps (`history`), so nothing of a sequence stays on the device: preemption, other
rows and a worker's death change nothing. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.sampling.logit_bias import bias_arrays
from baton.engine.scheduling.batch import Draw

# Bias of a token that must not be drawn: below every logit, yet the sum of a row stays finite.
BARRED_BIAS = -1e30


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Of the draws of a step, a row each; tensors on one device."""

    bounds: Tensor  # int64 [4, rows]: where the row's lists begin and end, as drawn above
    penalties: Tensor  # float64 [3, rows]: repetition, frequency, presence
    fed: Tensor  # int64 [rows]: a token of output that the lists miss; -1: none
    tokens: Tensor  # int32 [entries]: in each list of a row, no token twice
    amounts: Tensor  # float32 [entries]: counts, biases; unused for seen tokens

    @staticmethod
    def of(draws: Sequence[Draw | None], room: tuple[Tensor, Tensor] | None = None) -> Adjustments:
        """Adjustments of `draws`, on the CPU, that miss no token; None has no adjustments. `room`:
        memory for tokens and amounts, of `most_entries` of these draws at least."""
        bounds = np.zeros((4, len(draws)), dtype=np.int64)
        penalties = np.zeros((3, len(draws)))
        penalties[0] = 1.0
        found = [
            (row, draw, _lists(draw))
            for row, draw in enumerate(draws)
            if draw is not None and _adjusts(draw)
        ]
        total = sum(_length(lists) for _, _, lists in found)
        tokens, amounts = room or (
            torch.empty(total, dtype=torch.int32),
            torch.empty(total, dtype=torch.float32),
        )
        tokens, amounts = tokens[:total], amounts[:total]
        token_array, amount_array = tokens.numpy(), amounts.numpy()
        end = 0
        for row, draw, lists in found:
            if draw.history is not None:
                penalties[:, row] = (
                    draw.params.repetition_penalty,
                    draw.params.frequency_penalty,
                    draw.params.presence_penalty,
                )
            bounds[0, row] = end
            for place, parts in enumerate(lists, 1):
                for part, part_amounts in parts:
                    first, end = end, end + len(part)
                    token_array[first:end] = part
                    if part_amounts is not None:
                        amount_array[first:end] = part_amounts
                bounds[place, row] = end
        fed = torch.full((len(draws),), -1, dtype=torch.int64)
        return Adjustments(
            torch.from_numpy(bounds), torch.from_numpy(penalties), fed, tokens, amounts
        )

    def to(self, device: torch.device) -> Adjustments:
        return Adjustments(
            self.bounds.to(device),
            self.penalties.to(device),
            self.fed.to(device),
            self.tokens.to(device),
            self.amounts.to(device),
        )


def most_entries(draws: Sequence[Draw | None]) -> int:
    """Return how many entries the draws' lists have at most, once each counts one token more."""
    found = 0
    for draw in draws:
        if draw is not None and _adjusts(draw):
            found += 2 + _length(_lists(draw))
    return found


def _adjusts(draw: Draw) -> bool:
    return draw.history is not None or bool(draw.params.logit_bias)


# The parts of one list of a row: tokens, and their amounts where it has some.
_Parts = list[tuple[NDArray[np.int64], NDArray[np.generic] | None]]
_Lists = tuple[_Parts, _Parts, _Parts]


def _length(lists: _Lists) -> int:
    return sum(len(tokens) for parts in lists for tokens, _ in parts)


def _lists(draw: Draw) -> _Lists:
    """Seen, counted and biased tokens, each with their amounts."""
    params, history = draw.params, draw.history
    seen: _Parts = []
    counted: _Parts = []
    if history is not None:
        counts = history.counts()
        if params.repetition_penalty != 1.0:
            distinct = history.text.prompt.distinct
            seen = [(distinct, None), (counts.fresh, None)]
        if params.frequency_penalty or params.presence_penalty:
            counted = [(counts.tokens, counts.counts)]
    if not params.logit_bias:
        return seen, counted, []
    bias = bias_arrays(params.logit_bias)
    return seen, counted, [(bias.tokens, np.maximum(bias.amounts, BARRED_BIAS))]
