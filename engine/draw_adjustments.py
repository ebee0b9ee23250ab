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

from baton.engine.batch import Draw
from baton.engine.bias import bias_arrays

# Bias of a token that must not be drawn: below every logit, yet the sum of a row stays finite.
BARRED_BIAS = -1e30

_NO_TOKENS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_NO_AMOUNTS: NDArray[np.float32] = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Of the draws of a step, a row each; tensors on one device."""

    bounds: Tensor  # int64 [4, rows]: where the row's lists begin and end, as drawn above
    penalties: Tensor  # float64 [3, rows]: repetition, frequency, presence
    fed: Tensor  # int64 [rows]: a token of output that the lists miss; -1: none
    tokens: Tensor  # int32 [entries]: in each list of a row, no token twice
    amounts: Tensor  # float32 [entries]: counts, biases; unused for seen tokens

    @staticmethod
    def of(draws: Sequence[Draw | None]) -> Adjustments:
        """Adjustments of `draws`, on the CPU, that miss no token; None has no adjustments."""
        bounds = np.zeros((4, len(draws)), dtype=np.int64)
        penalties = np.zeros((3, len(draws)))
        penalties[0] = 1.0
        tokens, amounts = [_NO_TOKENS], [_NO_AMOUNTS]
        end = 0
        for row, draw in enumerate(draws):
            if draw is None or not _adjusts(draw):
                continue
            params = draw.params
            if draw.history is not None:
                penalties[:, row] = (
                    params.repetition_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                )
            bounds[0, row] = end
            for place, found in enumerate(_lists(draw), 1):
                for each, amount in found:
                    tokens.append(each)
                    amounts.append(amount.astype(np.float32))
                    end += len(each)
                bounds[place, row] = end
        return Adjustments(
            torch.from_numpy(bounds),
            torch.from_numpy(penalties),
            torch.full((len(draws),), -1, dtype=torch.int64),
            torch.from_numpy(np.concatenate(tokens).astype(np.int32)),
            torch.from_numpy(np.concatenate(amounts)),
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
            found += 2 + sum(len(each) for part in _lists(draw) for each, _ in part)
    return found


def _adjusts(draw: Draw) -> bool:
    return draw.history is not None or bool(draw.params.logit_bias)


_List = list[tuple[NDArray[np.int64], NDArray[np.generic]]]


def _lists(draw: Draw) -> tuple[_List, _List, _List]:
    """Seen, counted and biased tokens, each with their amounts."""
    params, history = draw.params, draw.history
    seen: _List = []
    counted: _List = []
    if history is not None:
        counts = history.counts()
        if params.repetition_penalty != 1.0:
            distinct = history.text.prompt.distinct
            seen = [(distinct, distinct), (counts.fresh, counts.fresh)]
        if params.frequency_penalty or params.presence_penalty:
            counted = [(counts.tokens, counts.counts)]
    if not params.logit_bias:
        return seen, counted, []
    bias = bias_arrays(params.logit_bias)
    return seen, counted, [(bias.tokens, np.maximum(bias.amounts, BARRED_BIAS))]
