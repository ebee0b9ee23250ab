"""The CPU's kernels of the deterministic mode: a sequence's bits depend on the sequence alone.

They do not depend on the other slices of a step, on the chunks of a prompt, on the worker that
computed a cached prefix, or on the number of threads. Attention, products and gates are
batch-invariant; everything else in the decoder works on one row, or one number, at a time. On a
processor with bfloat16 instructions, these are the ordinary kernels except decode's attention.
`determinism_proof` proves the property before a runner is used. The module keeps no state.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from baton.engine.cpu.attention_bf16 import usable
from baton.engine.cpu.attention_bf16_invariant import InvariantBfloatAttention
from baton.engine.cpu.attention_invariant import InvariantAttention
from baton.engine.cpu.row_kernels import NumbaNorms, fits, silu_gate, warm_up
from baton.engine.cpu.strict_kernels import strict_gate
from baton.engine.cpu_draws.sampling_numba import compiled_sampler
from baton.engine.deterministic.linear_invariant import with_invariant_linears
from baton.engine.deterministic.mla_invariant import InvariantLatentAttention
from baton.engine.execution.decoder_kernels import DecoderKernels
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import TorchAttention
from baton.engine.model.weights import Weights
from baton.engine.spec.families import Activation
from baton.engine.spec.model_spec import ModelSpec


def invariant_kernels(spec: ModelSpec, pool: KvPool) -> DecoderKernels:
    """Return kernels whose results for a row do not depend on the other rows."""
    warm_up()
    gating = partial(invariant_gate, activation=spec.activation)
    return DecoderKernels(_attention(spec, pool), gating, NumbaNorms(), sampler=compiled_sampler())


def invariant_weights(weights: Weights) -> Weights:
    """Return `weights` with products whose rows do not depend on each other."""
    made: Weights = with_invariant_linears(weights)
    return made


def _attention(spec: ModelSpec, pool: KvPool) -> InvariantLatentAttention | TorchAttention:
    if spec.latent is not None:
        return InvariantLatentAttention(pool, spec.latent, spec.heads, spec.attention)
    if usable(pool):
        return InvariantBfloatAttention(pool, spec.attention)
    return InvariantAttention(pool, spec.attention)


def invariant_gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up, [rows, ffn], of `gate_up` [rows, 2 ffn]. The choice of the kernel does
    not depend on the number of rows."""
    if activation == "silu" and fits(gate_up, gate_up.shape[1] // 2):
        return silu_gate(gate_up)
    return strict_gate(gate_up, activation)
