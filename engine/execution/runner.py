"""The step runner: a StepBatch in, a StepResult out, synchronously.

Holds the decoder and the pool of one device. Knows no queue, no event loop and no request;
whoever calls it (the device thread) calls it from one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.execution.divided_step import run_divided
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.memory_plan import MemoryPlan
from baton.engine.model.attention import Attention
from baton.engine.model.decoder import Decoder, WholePass
from baton.engine.model.mla import LatentAttention
from baton.engine.model.row_ops import Gating, Norms
from baton.engine.model.step_layout import Bounds, StepLayout, lay_out
from baton.engine.model.weights import Weights
from baton.engine.sampling.draw_plan import DrawPlan, Sampler, one_each, plan_draws, sample_on_host
from baton.engine.sampling.prompt_scoring import score
from baton.engine.scheduling.batch import (
    Done,
    Draw,
    Drawn,
    Scores,
    Started,
    StepBatch,
    StepResult,
    fed,
    unfinished,
)
from baton.engine.scheduling.draw_costs import DrawCosts, measure_draws
from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ConfigError


class ModelRunner:
    """Runs steps. `max_context` in tokens; 0 means the model's own."""

    overlaps = False

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        pool: KvPool,
        attention: Attention | LatentAttention,
        max_context: int = 0,
        gating: Gating | None = None,
        norms: Norms | None = None,
        whole: WholePass | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """`sampler` None: by torch on the CPU. Raises ConfigError if the model has less context
        than `max_context`."""
        if not 0 <= max_context <= spec.max_context:
            raise ConfigError(
                f"worker.max_context is {max_context}: the model has {spec.max_context} tokens "
                "of context; give 0 or at most that"
            )
        self.spec = spec
        self.pool = pool
        self.max_context = max_context or spec.max_context
        self.memory: MemoryPlan | None = None  # set by who sized the pool
        self.numerics = ""  # names the bits that this runner computes, where it is deterministic
        self.decoder = Decoder(spec, weights, attention, gating, norms, whole)
        self._sampler = sampler or sample_on_host
        self._last: StepResult | None = None  # whose draws the next step may continue with
        self._bounds = Bounds(pool.blocks, pool.block_size, spec.vocab_size, self.max_context)

    def start(self, batch: StepBatch) -> Started:
        """As `run`: the step is over when this returns."""
        return Done(self.run(batch))

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        """Compute the KV of all slices and the draws of those that have some; in parts where
        memory is short.

        Raises EngineError, before anything is written, if a slice breaks its bounds.
        """
        before, self._last = self._last, unfinished(batch)
        self._last = run_divided(self._compute, fed(batch, before))
        return self._last

    def _compute(self, batch: StepBatch) -> StepResult:
        started = time.perf_counter()
        layout, plan = prepare(batch, self._bounds)
        hidden = self.decoder.hidden(self._placed(layout))
        broken = plan.refused | _broken_slices(hidden, layout)
        scores = self._score(batch, layout, hidden, broken)
        drawn = self._draw(plan, hidden, broken)
        return StepResult(drawn, time.perf_counter() - started, frozenset(broken), scores=scores)

    @torch.inference_mode()
    def all_logits(self, batch: StepBatch) -> list[Tensor]:
        """Float32 logits [tokens, vocab] of every slice; writes the KV as `run` does."""
        layout = self._placed(lay_out(batch, self._bounds))
        logits = self.decoder.logits(self.decoder.hidden(layout))
        return [logits[first:end] for first, end in layout.spans]

    @torch.inference_mode()
    def all_hidden(self, batch: StepBatch) -> list[Tensor]:
        """Final hidden states [tokens, hidden] of every slice; writes the KV as `run` does."""
        layout = self._placed(lay_out(batch, self._bounds))
        hidden = self.decoder.hidden(layout)
        return [hidden[first:end] for first, end in layout.spans]

    @torch.inference_mode()
    def measure_draws(self) -> DrawCosts:
        """What draws cost here; before the first step."""
        vocab = self.spec.vocab_size
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(1, vocab, generator=generator).to(self.pool.tensor.device)

        def draw(draws: Sequence[Draw]) -> object:
            return self._sampler(logits.expand(len(draws), -1).clone(), one_each(draws))

        return measure_draws(draw, vocab)

    def _placed(self, layout: StepLayout) -> StepLayout:
        """Where the pool is."""
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
        logits = self.decoder.logits(hidden[plan.last_rows])
        finite = logits.sum(dim=-1).isfinite()
        if not finite.all():
            lost = {i for i, ok in zip(plan.drawing, finite.tolist(), strict=True) if not ok}
            broken |= lost
            logits, plan = logits[finite], plan.without(lost)
        return plan.by_slice(self._sampler(logits, plan))


def prepare(batch: StepBatch, bounds: Bounds) -> tuple[StepLayout, DrawPlan]:
    """All of a step that needs no device. Raises EngineError as `lay_out` does."""
    layout = lay_out(batch, bounds)
    return layout, plan_draws(batch, layout, bounds.vocab_size)


def _broken_slices(hidden: Tensor, layout: StepLayout) -> set[int]:
    """Slices with a hidden state that is not finite, so that no such KV is shared."""
    finite = hidden.sum(dim=-1, dtype=torch.float32).isfinite()
    if finite.all():
        return set()
    spans = enumerate(layout.spans)
    return {index for index, (first, end) in spans if not finite[first:end].all()}
