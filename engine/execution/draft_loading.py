"""Loads a draft model from its folder, beside its target on a CPU.

The target's reader loads it in the target's dtype, and the same kernels compute it. The module
keeps no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.checkpoint.weights import load_weights
from baton.engine.cpu.linear import CpuMatrices
from baton.engine.execution.cpu_kernels import cpu_kernels
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.weights import Weights
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.engine.speculation.draft_model import DraftModel
from baton.engine.speculation.draft_pair import check_pair


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft model before it has a pool."""

    spec: ModelSpec
    weights: Weights

    def model(self, pool: KvPool, max_context: int, backend: str) -> DraftModel:
        """Return the draft model, which computes in the draft group of its target's pool."""
        assert pool.draft is not None
        kernels = cpu_kernels(backend, self.spec, self.weights, pool.draft)
        decoder = kernels.decoder(self.spec, self.weights)
        return DraftModel(self.spec, decoder, pool.draft, max_context, kernels.sampler)


def draft_spec_for(
    folder: Path, spec: ModelSpec, draft_folder: Path | None, max_context: int
) -> ModelSpec | None:
    """Read the draft model's spec and check that it fits the target; None: no draft model. Raises
    ModelError."""
    if draft_folder is None:
        return None
    draft = read_spec(draft_folder, max_context)
    check_pair(folder, spec, draft_folder, draft, max_context or spec.max_context)
    return draft


def load_draft(folder: Path, spec: ModelSpec, dtype: torch.dtype) -> DraftWeights:
    """Read the draft model's weights. Raises ModelError."""
    return DraftWeights(spec, load_weights(folder, spec, dtype, CpuMatrices()))
