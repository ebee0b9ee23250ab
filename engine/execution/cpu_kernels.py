"""The choice of the CPU's kernels: compiled by numba, or plain torch.

    backend "torch"   plain torch
    backend "numba"   compiled attention; an error without numba, and for float16
    backend "auto"    compiled where numba is installed and the dtype has kernels

Gates, norms and draws are compiled wherever numba is installed, except for "torch". MLA has one
attention, for every backend. Keeps no state.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from baton.engine.execution.decoder_kernels import DecoderKernels
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import TorchAttention
from baton.engine.model.decoder import FusedPass
from baton.engine.model.mla import LatentAttention
from baton.engine.model.row_ops import Gating, Norms
from baton.engine.model.weights import Weights
from baton.engine.sampling.draw_plan import Sampler, sample_on_host
from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ConfigError

if TYPE_CHECKING:
    from baton.engine.cpu.attention_kv_quant import KvQuantAttention
    from baton.engine.cpu.attention_numba import NumbaAttention
    from baton.engine.cpu.decode_pass import RankSums

_BACKENDS = ("auto", "torch", "numba")


def cpu_kernels(
    backend: str, spec: ModelSpec, weights: Weights, pool: KvPool, sums: RankSums | None = None
) -> DecoderKernels:
    """Return the kernels of `backend`, with a pass over all layers in one call if there is one.
    `sums`: over the ranks of a worker, if the weights are those of a rank. Raises ConfigError for
    an unknown or missing backend."""
    if backend not in _BACKENDS:
        raise ConfigError(f"attention backend {backend!r}: give auto, torch or numba")
    gating, norms = row_kernels(spec, pool.dtype, backend)
    sampler = host_sampler(backend)
    if spec.latent is not None:
        mla = LatentAttention(pool, spec.latent, spec.heads, spec.attention.scale)
        return DecoderKernels(mla, gating, norms, sampler=sampler)
    compiled = _compiled_attention(pool, spec, backend)
    if compiled is None:
        torch_attention = TorchAttention(pool, spec.attention)
        return DecoderKernels(torch_attention, gating, norms, sampler=sampler)
    fused_pass = _fused_pass(spec, weights, compiled.bfloat_pool, sums)
    return DecoderKernels(compiled, gating, norms, fused_pass, sampler)


def _compiled_attention(
    pool: KvPool, spec: ModelSpec, backend: str
) -> NumbaAttention | KvQuantAttention | None:
    half = pool.dtype == torch.float16
    if backend == "torch" or (backend == "auto" and (half or not _has_numba())):
        return None
    if half:
        raise ConfigError("attention backend 'numba' has no float16: give auto or torch")
    try:
        from baton.engine.cpu.attention_kv_quant import KvQuantAttention
        from baton.engine.cpu.attention_numba import NumbaAttention
    except ImportError as error:
        raise ConfigError(f"attention backend {backend!r} needs numba: {error}") from error
    attention = spec.attention
    return (
        NumbaAttention(pool, attention) if pool.quant is None else KvQuantAttention(pool, attention)
    )


def row_kernels(
    spec: ModelSpec, dtype: torch.dtype, backend: str
) -> tuple[Gating | None, Norms | None]:
    """Return compiled gates and norms for bfloat16; torch's are about as fast for float32."""
    if backend == "torch" or dtype != torch.bfloat16 or not _has_numba():
        return None, None
    from baton.engine.cpu.row_kernels import NumbaNorms, silu_gate, warm_up

    warm_up()
    return (silu_gate if spec.activation == "silu" else None), NumbaNorms()


def host_sampler(backend: str) -> Sampler:
    """Return the sampler of `backend`."""
    if backend == "torch" or not _has_numba():
        return sample_on_host
    from baton.engine.cpu_draws.sampling_numba import compiled_sampler

    return compiled_sampler()


def _fused_pass(
    spec: ModelSpec, weights: Weights, bfloat_pool: torch.Tensor | None, sums: RankSums | None
) -> FusedPass | None:
    """Return the decode pass in one compiled call, if the attention has the bfloat16 kernels."""
    if bfloat_pool is None:
        return None
    from baton.engine.cpu.decode_pass import DecodePass, decode_pass

    found: DecodePass | None = decode_pass(spec, weights, bfloat_pool, sums)
    return found


def _has_numba() -> bool:
    return find_spec("numba") is not None
