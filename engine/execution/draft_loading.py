"""Loads the folder of a draft model or an EAGLE-3 head as a drafter beside its target on a CPU.

A draft model is loaded by the target's own reader; both have the target's dtype and kernels. Keeps
no state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.checkpoint.eagle3_weights import load_eagle3_weights
from baton.engine.checkpoint.weights import load_weights
from baton.engine.execution.backend_choice import CpuBackend
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.runner import ModelRunner
from baton.engine.model.attention import TorchAttention
from baton.engine.model.eagle3_head import FIRST_SLOT, Eagle3Head, Eagle3Weights
from baton.engine.model.row_ops import TorchNorms, torch_gating
from baton.engine.model.step_layout import Bounds
from baton.engine.model.weights import Weights
from baton.engine.spec.eagle3_spec import Eagle3Spec
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.engine.speculation.draft_model import DraftModel, check_pair
from baton.engine.speculation.eagle3_drafter import (
    Eagle3Drafter,
    FeatureDecoder,
    StateDecoder,
    head_spec_for,
    refuse_head,
)


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft model before it has a pool."""

    spec: ModelSpec
    weights: Weights

    def attach(self, runner: ModelRunner, backend: CpuBackend) -> None:
        """Make it propose for `runner`, computing in the draft group of its pool."""
        pool = runner.pool.draft
        assert pool is not None
        kernels, weights = backend.prepare(self.spec, self.weights, pool)
        decoder = kernels.decoder(self.spec, weights)
        runner.draft = DraftModel(self.spec, decoder, pool, runner.max_context, kernels.sampler)


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """An EAGLE-3 head before it has a pool."""

    spec: Eagle3Spec
    weights: Eagle3Weights

    def attach(self, runner: ModelRunner, backend: CpuBackend) -> None:
        """Make it propose for `runner`, whose decoder then keeps features for it."""
        pool, target, layer = runner.pool.draft, runner.spec, self.spec.layer
        assert pool is not None and isinstance(runner.decoder, StateDecoder)
        gating, norms = backend.row_kernels(layer, pool.dtype)
        gating = gating or partial(torch_gating, activation=layer.activation)
        attention = TorchAttention(pool, layer.attention, FIRST_SLOT)
        head = Eagle3Head(self.spec, self.weights, attention, gating, norms or TorchNorms())
        layers = self.spec.layers_of(target.layers)
        runner.decoder = FeatureDecoder(runner.decoder, head, pool, layers)
        bounds = Bounds(pool.blocks, pool.block_size, target.vocab_size, runner.max_context)
        runner.draft = Eagle3Drafter(head, pool, bounds, backend.sampler())


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model, or an EAGLE-3 head, that fits its target; nothing of it is loaded."""

    folder: Path
    spec: ModelSpec | Eagle3Spec

    @property
    def group(self) -> ModelSpec:
        """Return the model of its layer group in the pool."""
        return self.spec.layer if isinstance(self.spec, Eagle3Spec) else self.spec

    def load(
        self, dtype: torch.dtype, embedding: Callable[[], Tensor]
    ) -> DraftWeights | HeadWeights:
        """Read the weights; `embedding` returns the target's, whole. Raises ModelError."""
        folder, spec, matrices = self.folder, self.spec, CpuBackend().matrices(dtype)
        if isinstance(spec, ModelSpec):
            return DraftWeights(spec, load_weights(folder, spec, dtype, matrices))
        found = load_eagle3_weights(folder, spec, dtype, matrices, embedding)
        return HeadWeights(spec, found)


def draft_source(folder: Path, spec: ModelSpec, options: EngineOptions) -> DraftSource | None:
    """Read what the options' draft model or head is, and check that it fits the model of `folder`;
    None where there is none. Raises ModelError."""
    draft_folder, context = options.draft_folder, options.max_context
    if draft_folder is None:
        return None
    if options.draft_kind == "eagle3":
        return DraftSource(draft_folder, head_spec_for(spec, draft_folder, context))
    refuse_head(draft_folder)
    draft = read_spec(draft_folder, context)
    check_pair(folder, spec, draft_folder, draft, context or spec.max_context)
    return DraftSource(draft_folder, draft)
