"""The step runner: computes the StepResult of a StepBatch synchronously.

Owns the decoder and the pool of one device. Knows no queue, no event loop and no request; one
thread at a time (the device thread) calls it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.execution.divided_step import run_divided
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.memory_plan import MemoryPlan
from baton.engine.model.step_layout import Bounds, StepLayout, lay_out
from baton.engine.sampling.draw_plan import (
    DrawPlan,
    Sampler,
    one_draw_each,
    plan_draws,
    sample_on_host,
)
from baton.engine.sampling.prompt_scoring import score
from baton.engine.scheduling.batch import (
    Draw,
    Drawn,
    FinishedStep,
    RunningStep,
    Scores,
    Slice,
    StepBatch,
    StepResult,
    failed_result,
    resolve_feeds,
)
from baton.engine.scheduling.draw_costs import DrawCosts, measure_draws
from baton.engine.scheduling.verification import with_drafts
from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ConfigError


class StepDecoder(Protocol):
    """Computes the hidden states and logits of a step: `Decoder`, or several ranks' ones."""

    def hidden(self, layout: StepLayout) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def shortened(self) -> StepDecoder: ...


class Drafter(Protocol):
    """Proposes tokens within a step: a `DraftModel` or an `Eagle3Drafter`."""

    def run(self, slices: Sequence[Slice]) -> dict[int, tuple[int, ...]]:
        """Return the proposals of the slices that want some, before the target computes."""
        ...

    def follow(self, slices: Sequence[Slice]) -> None:
        """Compute what needs the target's results of these slices."""
        ...


class ModelRunner:
    """Runs steps. `max_context` in tokens; 0 means the model's own."""

    overlaps = False

    def __init__(
        self,
        spec: ModelSpec,
        pool: KvPool,
        decoder: StepDecoder,
        max_context: int = 0,
        sampler: Sampler = sample_on_host,
    ) -> None:
        """`decoder` writes into `pool`. Raises ConfigError if the model has less context than
        `max_context`."""
        if not 0 <= max_context <= spec.max_context:
            raise ConfigError(
                f"worker.max_context is {max_context}: the model has {spec.max_context} tokens "
                "of context; give 0 or at most that"
            )
        self.spec = spec
        self.pool = pool
        self.max_context = max_context or spec.max_context
        self.memory: MemoryPlan | None = None  # set by the loader
        self.draft: Drafter | None = None  # set by the loader, before the first step
        self.numerics: str | None = None  # identifies the bits of a deterministic runner
        self.decoder: StepDecoder = decoder
        self._sampler = sampler
        self._last: StepResult | None = None  # feeds the next step
        self._bounds = Bounds(pool.blocks, pool.block_size, spec.vocab_size, self.max_context)

    def close(self) -> None:
        """End nothing: a runner of one process has started nothing."""

    def start(self, batch: StepBatch) -> RunningStep:
        """Same as `run`: the step has ended when this returns."""
        return FinishedStep(self.run(batch))

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        """Compute the KV and the draws of all slices; in parts if memory runs out.

        Raises EngineError, before anything is written, if a slice breaks its bounds.
        """
        before, self._last = self._last, failed_result(batch)
        self._last = run_divided(self._compute, resolve_feeds(batch, before))
        return self._last

    def _compute(self, batch: StepBatch) -> StepResult:
        started = time.perf_counter()
        proposed: dict[int, tuple[int, ...]] = {}
        if self.draft is not None:
            proposed = self.draft.run(batch.slices)
            batch = with_drafts(batch, proposed)
        drafted = time.perf_counter()
        layout, plan = prepare(batch, self._bounds)
        hidden = self.decoder.hidden(self._on_device(layout))
        if self.draft is not None:
            self.draft.follow(batch.slices)
        broken = plan.refused | _broken_slices(hidden, layout, batch)
        scores = self._score(batch, layout, hidden, broken)
        drawn = self._draw(plan, hidden, broken)
        return StepResult(
            drawn,
            time.perf_counter() - started,
            frozenset(broken),
            scores=scores,
            proposed=proposed,
            draft_s=drafted - started if proposed else 0.0,
        )

    @torch.inference_mode()
    def all_logits(self, batch: StepBatch) -> list[Tensor]:
        """Return float32 logits [tokens, vocab] of every slice; writes the KV like `run`."""
        layout = self._on_device(lay_out(batch, self._bounds))
        logits = self.decoder.logits(self.decoder.hidden(layout))
        return [logits[first:end] for first, end in layout.spans]

    @torch.inference_mode()
    def all_hidden(self, batch: StepBatch) -> list[Tensor]:
        """Return final hidden states [tokens, hidden] of every slice; writes the KV like `run`."""
        layout = self._on_device(lay_out(batch, self._bounds))
        hidden = self.decoder.hidden(layout)
        return [hidden[first:end] for first, end in layout.spans]

    @torch.inference_mode()
    def measure_draws(self) -> DrawCosts:
        """Measure the cost of draws on this device, before the first step."""
        vocab = self.spec.vocab_size
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(1, vocab, generator=generator).to(self.pool.tensor.device)

        def draw(draws: Sequence[Draw]) -> object:
            return self._sampler(logits.expand(len(draws), -1).clone(), one_draw_each(draws))

        return measure_draws(draw, vocab)

    def _on_device(self, layout: StepLayout) -> StepLayout:
        """Move the layout to the device of the pool."""
        device = self.pool.tensor.device
        return layout if device.type == "cpu" else layout.to(device)

    def _score(
        self, batch: StepBatch, layout: StepLayout, hidden: Tensor, broken: set[int]
    ) -> dict[int, Scores]:
        """Adds to `broken` the slices whose logits are not finite."""
        found = {}
        for index, item in enumerate(batch.slices):
            if item.scoring is None or index in broken:
                continue
            first, end = layout.spans[index]
            rows, vocab = hidden[first:end], self.spec.vocab_size
            scores = score(self.decoder.logits, rows, item.scoring, vocab)
            if scores is None:
                broken.add(index)
            else:
                found[index] = scores
        return found

    def _draw(
        self, plan: DrawPlan, hidden: Tensor, broken: set[int]
    ) -> tuple[tuple[Drawn, ...], ...]:
        """Adds to `broken` the slices whose logits are not finite."""
        plan = plan.without(broken)
        if not plan.draws:
            return plan.by_slice([])
        logits = self.decoder.logits(hidden[plan.rows])
        finite = logits.sum(dim=-1).isfinite()
        if not finite.all():
            plan, kept, bad = plan.finite_rows(finite.tolist())
            broken |= bad
            logits = logits[torch.tensor(kept, device=logits.device)]
        return plan.by_slice(self._sampler(logits, plan))


def prepare(batch: StepBatch, bounds: Bounds) -> tuple[StepLayout, DrawPlan]:
    """Prepare a step without the device. Raises EngineError like `lay_out`."""
    layout = lay_out(batch, bounds)
    return layout, plan_draws(batch, layout, bounds.vocab_size)


def _broken_slices(hidden: Tensor, layout: StepLayout, batch: StepBatch) -> set[int]:
    """Return the slices with a non-finite hidden state, so that their KV is not shared. Rows of
    proposals are left to the check of their logits: KV of rejected tokens is not shared."""
    finite = hidden.sum(dim=-1, dtype=torch.float32).isfinite()
    if finite.all():
        return set()
    known = [end - item.proposed for item, (_, end) in zip(batch.slices, layout.spans, strict=True)]
    spans = enumerate(zip(layout.spans, known, strict=True))
    return {index for index, ((first, _), end) in spans if not finite[first:end].all()}
