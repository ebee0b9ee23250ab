"""The draws of a step and their rows, planned before the device runs.

Knows no logits. A slice whose bias names a token that the model does not have is refused here, so
that one request's error does not fail the step of the others. Immutable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from baton.engine.model.step_layout import StepLayout
from baton.engine.sampling.logit_bias import bias_arrays
from baton.engine.sampling.sampling import DrawGroups, RandomDraw, group_draws, sample, torch_draw
from baton.engine.scheduling.batch import Draw, Drawn, StepBatch


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """The draws of a step, in the order of its slices."""

    slices: int  # in the batch
    drawing: list[int]  # indices of the slices that draw
    counts: list[int]  # draws of each of these slices
    last_rows: Tensor  # int64 [drawing]: the row of each slice's last token
    draws: list[Draw]  # of all of these slices
    groups: DrawGroups
    refused: set[int]

    def logit_rows(self, logits: Tensor) -> Tensor:
        """Return one row for each draw, of `logits` [drawing, vocab]; the same tensor if every
        slice draws once."""
        if len(self.draws) == len(self.drawing):
            return logits
        return logits.repeat_interleave(torch.tensor(self.counts, device=logits.device), dim=0)

    def by_slice(self, drawn: list[Drawn]) -> tuple[tuple[Drawn, ...], ...]:
        """Group `drawn`, one for each draw, by slice for a `StepResult`."""
        found: list[tuple[Drawn, ...]] = [()] * self.slices
        start = 0
        for index, count in zip(self.drawing, self.counts, strict=True):
            found[index] = tuple(drawn[start : start + count])
            start += count
        return tuple(found)

    def without(self, broken: Collection[int]) -> DrawPlan:
        """Return the plan without these slices."""
        if not any(index in broken for index in self.drawing):
            return self
        kept = [at for at, index in enumerate(self.drawing) if index not in broken]
        ends = np.cumsum(self.counts).tolist()
        draws = [d for p in kept for d in self.draws[ends[p] - self.counts[p] : ends[p]]]
        return replace(
            self,
            drawing=[self.drawing[at] for at in kept],
            counts=[self.counts[at] for at in kept],
            last_rows=self.last_rows[kept],
            draws=draws,
            groups=group_draws(draws),
        )


def one_draw_each(draws: Sequence[Draw]) -> DrawPlan:
    """Return a plan of slices that draw once each, in this order."""
    rows = list(range(len(draws)))
    last_rows = torch.arange(len(draws))
    return DrawPlan(
        len(draws), rows, [1] * len(draws), last_rows, list(draws), group_draws(draws), set()
    )


def plan_draws(batch: StepBatch, layout: StepLayout, vocab_size: int) -> DrawPlan:
    """Plan the draws of `batch`, whose rows are those of `layout`."""
    refused = {
        index
        for index, item in enumerate(batch.slices)
        for draw in item.draws
        if draw.params.logit_bias and not bias_arrays(draw.params.logit_bias).known(vocab_size)
    }
    drawing = [i for i, item in enumerate(batch.slices) if item.draws and i not in refused]
    draws = [draw for index in drawing for draw in batch.slices[index].draws]
    return DrawPlan(
        slices=len(batch.slices),
        drawing=drawing,
        counts=[len(batch.slices[index].draws) for index in drawing],
        last_rows=torch.tensor([layout.spans[index][1] - 1 for index in drawing]),
        draws=draws,
        groups=group_draws(draws),
        refused=refused,
    )


# Draws one token for each draw of a plan from float32 logits [drawing slices, vocab].
Sampler = Callable[[Tensor, DrawPlan], list[Drawn]]


def sample_on_host(
    logits: Tensor, plan: DrawPlan, random_draw: RandomDraw = torch_draw
) -> list[Drawn]:
    """Draw on the CPU, as a `Sampler`; `random_draw` makes the draws with a temperature."""
    return sample(plan.logit_rows(logits.cpu()), plan.draws, plan.groups, random_draw)
