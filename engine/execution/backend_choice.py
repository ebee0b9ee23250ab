"""The choice of a model's backend: its matrices and its kernels. Nothing else chooses them; draws
inside CUDA graphs (`device_runner`), checksums and conversion follow the device of their pool.

    device   deterministic   matrices           kernels
    CPU      no              `cpu.linear`       compiled by numba, or plain torch: see below
    CPU      yes             `cpu.linear`       `invariant_kernels`
    GPU      either          `triton.matrices`  `device_kernels`

On a CPU that is not deterministic:

    backend "torch"   plain torch
    backend "numba"   compiled attention; an error without numba, and for float16
    backend "auto"    compiled where numba is installed and the dtype has kernels

Gates, norms and draws are compiled wherever numba is installed, except for "torch"; products of
bfloat16 are for every backend. MLA has one attention, for every backend. Within a backend, a
product or an attention still takes the kernel that the processor's instructions allow.

`MatrixBackend`, `DecoderKernels` and `Sampler` are the interface of a backend: the decoder and the
runners know nothing else of it. `CpuBackend` and `GpuBackend` make them from what each device has
(ranks that share memory; the sizes of graphs). No code takes either, so they share no interface.

Numba and triton are imported only for a model that needs them. Keeps no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from baton.engine.cpu.linear import CpuMatrices
from baton.engine.execution.decoder_kernels import DecoderKernels
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import TorchAttention
from baton.engine.model.decoder import FusedPass
from baton.engine.model.matrix_backend import MatrixBackend
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


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """The backend of a model, or of a rank's share of one, in host memory. `name`: see above."""

    name: str = "auto"
    deterministic: bool = False

    def matrices(self, dtype: torch.dtype) -> CpuMatrices:
        """Return the factory of the products of a model of `dtype`. Those of bfloat16 have compiled
        kernels."""
        compiled = dtype == torch.bfloat16 and _has_numba()
        return CpuMatrices(batch_invariant=self.deterministic, compiled=compiled)

    def prepare(
        self, spec: ModelSpec, weights: Weights, pool: KvPool, sums: RankSums | None = None
    ) -> tuple[DecoderKernels, Weights]:
        """Return the kernels over `pool`, and the weights that they compute with. `sums`: over
        the ranks of a worker, if the weights are those of a rank.

        Raises ConfigError for an unknown or missing backend.
        """
        if not self.deterministic:
            return _ordinary_kernels(self, spec, weights, pool, sums), weights
        try:
            from baton.engine.execution.invariant_kernels import (
                invariant_kernels,
                invariant_weights,
            )
        except ImportError as error:
            raise ConfigError(
                f"worker.deterministic needs numba: {error}; install numba, or serve without it"
            ) from error
        return invariant_kernels(spec, pool), invariant_weights(weights)

    def row_kernels(
        self, spec: ModelSpec, dtype: torch.dtype
    ) -> tuple[Gating | None, Norms | None]:
        """Return compiled gates and norms for bfloat16; torch's are about as fast for float32."""
        if self.name == "torch" or dtype != torch.bfloat16 or not _has_numba():
            return None, None
        from baton.engine.cpu.row_kernels import NumbaNorms, silu_gate, warm_up

        warm_up()
        return (silu_gate if spec.activation == "silu" else None), NumbaNorms()

    def sampler(self) -> Sampler:
        if self.name == "torch" or not _has_numba():
            return sample_on_host
        from baton.engine.cpu_draws.sampling_numba import compiled_sampler

        return compiled_sampler()


@dataclass(frozen=True, slots=True)
class GpuBackend:
    """The backend of a model, or of a rank's share of one, on `device`: a GPU, or the CPU under
    Triton's interpreter. Its methods raise ImportError without triton."""

    device: torch.device
    deterministic: bool = False

    def matrices(self) -> MatrixBackend:
        """Return the factory of the weights' products."""
        from baton.engine.triton.matrices import TritonMatrices

        return TritonMatrices(self.device)

    def prepare(
        self, spec: ModelSpec, weights: Weights, pool: KvPool, max_rows: int, context: int
    ) -> tuple[DecoderKernels, Weights]:
        """Return the kernels over `pool` for at most `max_rows` decoding sequences of `context`
        tokens, and the weights that they compute with. Raises ModelError for a matrix that has no
        batch-invariant product."""
        from baton.engine.execution.device_kernels import device_kernels, invariant_weights

        kernels = device_kernels(spec, pool, max_rows, context, deterministic=self.deterministic)
        return kernels, invariant_weights(weights) if self.deterministic else weights


def _ordinary_kernels(
    backend: CpuBackend, spec: ModelSpec, weights: Weights, pool: KvPool, sums: RankSums | None
) -> DecoderKernels:
    """Return the kernels of `backend`, with a pass over all layers in one call if there is one."""
    if backend.name not in _BACKENDS:
        raise ConfigError(f"attention backend {backend.name!r}: give auto, torch or numba")
    gating, norms = backend.row_kernels(spec, pool.dtype)
    sampler = backend.sampler()
    if spec.latent is not None:
        mla = LatentAttention(pool, spec.latent, spec.heads, spec.attention.scale)
        return DecoderKernels(mla, gating, norms, sampler=sampler)
    compiled = _compiled_attention(pool, spec, backend.name)
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
