"""Penalties and biases of a step's draws as token lists, for devices that apply them.

    row r:   bounds[0]        bounds[1]          bounds[2]          bounds[3]
                 │ seen tokens    │ output's counts   │ biased tokens    │

Rows without adjustments have no entries and no cost. Lists are made from the counts that each text
keeps (`token_history`), so the device keeps no state of a sequence: preemption, other rows and the
loss of a worker have no effect. Keeps no state.
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

# Bias of a forbidden token: below every logit, while the sum of a row stays finite.
FORBIDDEN_TOKEN_BIAS = -1e30


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Adjustments of a step's draws, one row each; tensors on one device."""

    bounds: Tensor  # int64 [4, rows]: bounds of the row's lists, as drawn above
    penalties: Tensor  # float64 [3, rows]: repetition, frequency, presence
    pending_token: Tensor  # int64 [rows]: output token that the lists lack; -1: none
    tokens: Tensor  # int32 [entries]: distinct within each list of a row
    amounts: Tensor  # float32 [entries]: counts, biases; unused for seen tokens

    @staticmethod
    def of(
        draws: Sequence[Draw | None], buffers: tuple[Tensor, Tensor] | None = None
    ) -> Adjustments:
        """Build the adjustments of `draws` on the CPU, without a pending token; None has none.
        `buffers`: memory for tokens and amounts, at least `max_entries` of these draws."""
        bounds = np.zeros((4, len(draws)), dtype=np.int64)
        penalties = np.zeros((3, len(draws)))
        penalties[0] = 1.0
        found = [
            (row, draw, _lists(draw))
            for row, draw in enumerate(draws)
            if draw is not None and _adjusts(draw)
        ]
        total = sum(_length(lists) for _, _, lists in found)
        tokens, amounts = buffers or (
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
            for column, parts in enumerate(lists, 1):
                for part, part_amounts in parts:
                    first, end = end, end + len(part)
                    token_array[first:end] = part
                    if part_amounts is not None:
                        amount_array[first:end] = part_amounts
                bounds[column, row] = end
        pending_token = torch.full((len(draws),), -1, dtype=torch.int64)
        return Adjustments(
            torch.from_numpy(bounds), torch.from_numpy(penalties), pending_token, tokens, amounts
        )

    def to(self, device: torch.device) -> Adjustments:
        return Adjustments(
            self.bounds.to(device),
            self.penalties.to(device),
            self.pending_token.to(device),
            self.tokens.to(device),
            self.amounts.to(device),
        )


def max_entries(draws: Sequence[Draw | None]) -> int:
    """Return how many entries the draws' lists have at most once each has one more token."""
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
    """Return the seen, counted and biased tokens, each with their amounts."""
    params, history = draw.params, draw.history
    seen: _Parts = []
    counted: _Parts = []
    if history is not None:
        counts = history.counts()
        if params.repetition_penalty != 1.0:
            distinct = history.text.prompt.distinct
            seen = [(distinct, None), (counts.fresh, None)]
        if params.frequency_penalty or params.presence_penalty:
            # A later draw of the same text counts further in place.
            counted = [(counts.tokens, counts.counts.copy())]
    if not params.logit_bias:
        return seen, counted, []
    bias = bias_arrays(params.logit_bias)
    return seen, counted, [(bias.tokens, np.maximum(bias.amounts, FORBIDDEN_TOKEN_BIAS))]
