"""The step runner: a StepBatch in, a StepResult out, synchronously.

Holds the decoder and the pool of one device. Knows no queue, no event loop and no request;
whoever calls it (the device thread) calls it from one thread at a time.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from baton.engine.attention import Attention
from baton.engine.batch import Drawn, StepBatch, StepResult
from baton.engine.decoder import Decoder
from baton.engine.latent import LatentAttention
from baton.engine.pool import KvPool
from baton.engine.sampling import sample
from baton.engine.spec import ModelSpec
from baton.engine.step_layout import Bounds, StepLayout, lay_out
from baton.engine.weights import Weights
from baton.runtime.errors import ConfigError


class ModelRunner:
    """Runs steps. `max_context` in tokens; 0 means the model's own."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        pool: KvPool,
        attention: Attention | LatentAttention,
        max_context: int = 0,
    ) -> None:
        """Raises ConfigError if `max_context` exceeds the model's."""
        if not 0 <= max_context <= spec.max_context:
            raise ConfigError(
                f"worker.max_context is {max_context}: the model has {spec.max_context} tokens "
                "of context; give 0 or at most that"
            )
        self.spec = spec
        self.pool = pool
        self.max_context = max_context or spec.max_context
        self._decoder = Decoder(spec, weights, attention)
        self._bounds = Bounds(pool.blocks, pool.block_size, spec.vocab_size, self.max_context)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        """Compute the KV of all slices and the draws of those that have some.

        Raises EngineError, before anything is written, if a slice breaks its bounds.
        """
        started = time.perf_counter()
        layout = lay_out(batch, self._bounds)
        hidden = self._decoder.hidden(layout)
        broken = _broken_slices(hidden, layout)
        drawn = self._draw(batch, layout, hidden, broken)
        return StepResult(drawn, time.perf_counter() - started, frozenset(broken))

    @torch.inference_mode()
    def all_logits(self, batch: StepBatch) -> list[Tensor]:
        """Float32 logits [tokens, vocab] of every slice; writes the KV as `run` does."""
        layout = lay_out(batch, self._bounds)
        logits = self._decoder.logits(self._decoder.hidden(layout))
        return [logits[first:end] for first, end in layout.spans]

    def _draw(
        self, batch: StepBatch, layout: StepLayout, hidden: Tensor, broken: set[int]
    ) -> tuple[tuple[Drawn, ...], ...]:
        """Adds to `broken` the slices whose logits are not finite, or whose bias names a token
        that the model does not have: one request's mistake must not fail the step of all."""
        broken.update(
            index
            for index, item in enumerate(batch.slices)
            if not all(
                self._knows(token) for draw in item.draws for token, _ in draw.params.logit_bias
            )
        )
        drawing = [
            index for index, item in enumerate(batch.slices) if item.draws and index not in broken
        ]
        drawn: list[tuple[Drawn, ...]] = [()] * len(batch.slices)
        if not drawing:
            return tuple(drawn)
        last_rows = torch.tensor([layout.spans[index][1] - 1 for index in drawing])
        logits = self._decoder.logits(hidden[last_rows])
        finite = logits.sum(dim=-1).isfinite().tolist()
        broken.update(index for index, good in zip(drawing, finite, strict=True) if not good)
        sources = [(place, index) for place, index in enumerate(drawing) if index not in broken]
        draws = [draw for _, index in sources for draw in batch.slices[index].draws]
        rows = [place for place, index in sources for _ in batch.slices[index].draws]
        tokens = iter(sample(logits[rows], draws))
        for _, index in sources:
            drawn[index] = tuple(next(tokens) for _ in batch.slices[index].draws)
        return tuple(drawn)

    def _knows(self, token: int) -> bool:
        return 0 <= token < self.spec.vocab_size


def _broken_slices(hidden: Tensor, layout: StepLayout) -> set[int]:
    """Slices with a hidden state that is not finite, so that no such KV is shared."""
    finite = hidden.sum(dim=-1, dtype=torch.float32).isfinite()
    if finite.all():
        return set()
    spans = enumerate(layout.spans)
    return {index for index, (first, end) in spans if not finite[first:end].all()}
