"""What computes a model on a CPU: compiled kernels where they can be had, else plain torch.

The one place that chooses them; a target and its draft model are made of the same. Keeps no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import Attention, TorchAttention
from baton.engine.model.decoder import FusedPass
from baton.engine.model.mla import LatentAttention
from baton.engine.model.row_ops import Gating, Norms
from baton.engine.model.weights import Weights
from baton.engine.sampling.draw_plan import Sampler
from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CpuParts:
    """Parts of a decoder over one pool; None: plain torch."""

    attention: Attention | LatentAttention
    gating: Gating | None
    norms: Norms | None
    fused_pass: FusedPass | None
    sampler: Sampler | None


def cpu_parts(spec: ModelSpec, weights: Weights, pool: KvPool, backend: str) -> CpuParts:
    """`backend`: auto, torch or numba. Raises ConfigError for one that cannot be had."""
    attention = _attention(pool, spec, backend)
    gating, norms = _rows(spec, pool.dtype, backend)
    fused_pass = _fused_pass(spec, weights, attention)
    return CpuParts(attention, gating, norms, fused_pass, _sampler(backend))


def _attention(pool: KvPool, model: ModelSpec, backend: str) -> Attention | LatentAttention:
    """ "auto": compiled where numba is installed and knows the kind of number, else plain torch.
    Latent attention has one implementation, for every backend."""
    if backend not in ("auto", "torch", "numba"):
        raise ConfigError(f"attention backend {backend!r}: give auto, torch or numba")
    spec = model.attention
    if model.latent is not None:
        return LatentAttention(pool, model.latent, model.heads, spec.scale)
    half = pool.dtype == torch.float16
    if backend == "torch" or (backend == "auto" and (half or find_spec("numba") is None)):
        return TorchAttention(pool, spec)
    if half:
        raise ConfigError("attention backend 'numba' has no float16: give auto or torch")
    try:
        from baton.engine.cpu.attention_kv_quant import CodesAttention
        from baton.engine.cpu.attention_numba import NumbaAttention
    except ImportError as error:
        raise ConfigError(f"attention backend {backend!r} needs numba: {error}") from error
    return NumbaAttention(pool, spec) if pool.codes is None else CodesAttention(pool, spec)


def _rows(spec: ModelSpec, kind: torch.dtype, backend: str) -> tuple[Gating | None, Norms | None]:
    """Compiled gates and norms for bfloat16; with float32, torch's own are not much slower."""
    if backend == "torch" or kind != torch.bfloat16 or find_spec("numba") is None:
        return None, None
    from baton.engine.cpu.row_kernels import NumbaNorms, silu_gate, warm_up

    warm_up()
    return (silu_gate if spec.activation == "silu" else None), NumbaNorms()


def _sampler(backend: str) -> Sampler | None:
    """Compiled draws where numba is installed."""
    if backend == "torch" or find_spec("numba") is None:
        return None
    from baton.engine.cpu.sampling_numba import compiled_sampler

    return compiled_sampler()


def _fused_pass(
    spec: ModelSpec, weights: Weights, attention: Attention | LatentAttention
) -> FusedPass | None:
    """Decode in one compiled call, where the attention's own kernels are the compiled ones."""
    pool = getattr(attention, "bfloat_pool", None)
    if pool is None:
        return None
    from baton.engine.cpu.decode_pass import DecodePass, decode_pass

    found: DecodePass | None = decode_pass(spec, weights, pool)
    return found
