"""The draws of a step and their rows, planned before the device runs.

Plans without logits; only `sample_on_host` takes them. A slice whose bias names a token that the
model does not have is refused here, so that one request's error does not fail the step of the
others. Immutable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from baton.engine.model.step_layout import StepLayout
from baton.engine.sampling.logit_bias import bias_arrays
from baton.engine.sampling.sampling import DrawGroups, DrawTokens, group_draws, sample, torch_draw
from baton.engine.scheduling.batch import Draw, Drawn, Slice, StepBatch
from baton.engine.scheduling.verification import accepted


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """The draws of a step, in the order of its slices. A slice draws from its last row, one that
    verifies proposals from each of its rows."""

    slices: int  # in the batch
    drawing: list[int]  # the slice of each row that is drawn from
    counts: list[int]  # draws of each of these rows
    rows: Tensor  # int64 [drawing]
    draws: list[Draw]  # of all of these rows
    groups: DrawGroups
    refused: set[int]
    verifying: dict[int, Slice] = field(default_factory=dict)  # those of the batch

    def logit_rows(self, logits: Tensor) -> Tensor:
        """Return one row for each draw, of `logits` [drawing, vocab]; the same tensor if every
        row is drawn from once."""
        if len(self.draws) == len(self.drawing):
            return logits
        return logits.repeat_interleave(torch.tensor(self.counts, device=logits.device), dim=0)

    def by_slice(self, drawn: list[Drawn]) -> tuple[tuple[Drawn, ...], ...]:
        """Group `drawn`, one for each draw, by slice for a `StepResult`."""
        found: list[tuple[Drawn, ...]] = [()] * self.slices
        start = 0
        for index, count in zip(self.drawing, self.counts, strict=True):
            found[index] += tuple(drawn[start : start + count])
            start += count
        for index, item in self.verifying.items():
            found[index] = accepted(item, found[index])
        return tuple(found)

    def without(self, broken: Collection[int]) -> DrawPlan:
        """Return the plan without these slices."""
        if not any(index in broken for index in self.drawing):
            return self
        return self._select([index not in broken for index in self.drawing])

    def finite_rows(self, finite: Sequence[bool]) -> tuple[DrawPlan, list[bool], set[int]]:
        """Return the plan up to the first row of each slice that is not finite, which rows those
        are, and the slices of which none is left. A row of a proposal that plain decoding may never
        compute must not break its slice."""
        ended: set[int] = set()
        kept = []
        for index, good in zip(self.drawing, finite, strict=True):
            if not good:
                ended.add(index)
            kept.append(index not in ended)
        plan = self._select(kept)
        return plan, kept, ended.difference(plan.drawing)

    def _select(self, rows: Sequence[bool]) -> DrawPlan:
        kept = [at for at, wanted in enumerate(rows) if wanted]
        ends = np.cumsum(self.counts).tolist()
        draws = [d for p in kept for d in self.draws[ends[p] - self.counts[p] : ends[p]]]
        return replace(
            self,
            drawing=[self.drawing[at] for at in kept],
            counts=[self.counts[at] for at in kept],
            rows=self.rows[kept],
            draws=draws,
            groups=group_draws(draws),
        )


def one_draw_each(draws: Sequence[Draw]) -> DrawPlan:
    """Return a plan of slices that draw once each, in this order."""
    slices = list(range(len(draws)))
    rows = torch.arange(len(draws))
    return DrawPlan(
        len(draws), slices, [1] * len(draws), rows, list(draws), group_draws(draws), set()
    )


def plan_draws(batch: StepBatch, layout: StepLayout, vocab_size: int) -> DrawPlan:
    """Plan the draws of `batch`, whose rows are those of `layout`."""
    refused = {
        index
        for index, item in enumerate(batch.slices)
        for draw in item.draws
        if draw.params.logit_bias and not bias_arrays(draw.params.logit_bias).known(vocab_size)
    }
    drawing: list[int] = []
    counts: list[int] = []
    rows: list[int] = []
    draws: list[Draw] = []
    for index, item in enumerate(batch.slices):
        if not item.draws or index in refused:
            continue
        draws += item.draws
        first, end = layout.spans[index]
        if item.proposed:
            rows += range(first, end)
            drawing += [index] * (end - first)
            counts += [1] * (end - first)
        else:
            rows.append(end - 1)
            drawing.append(index)
            counts.append(len(item.draws))
    return DrawPlan(
        slices=len(batch.slices),
        drawing=drawing,
        counts=counts,
        rows=torch.tensor(rows),
        draws=draws,
        groups=group_draws(draws),
        refused=refused,
        verifying={i: item for i, item in enumerate(batch.slices) if item.proposed},
    )


# Draws one token for each draw of a plan from float32 logits [drawing slices, vocab].
Sampler = Callable[[Tensor, DrawPlan], list[Drawn]]


def sample_on_host(
    logits: Tensor, plan: DrawPlan, draw_tokens: DrawTokens = torch_draw
) -> list[Drawn]:
    """Draw on the CPU, as a `Sampler`, with `draw_tokens`."""
    return sample(plan.logit_rows(logits.cpu()), plan.draws, plan.groups, draw_tokens)
