"""Operations on rows in plain torch: norms, gates, and functions of single numbers.

A backend may bring its own norms and gates; those here are the reference. Norms are
root-mean-square norms (Zhang and Sennrich 2019, arXiv:1910.07467). Keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.spec.families import Activation

VECTOR_COLUMNS = 64  # a multiple of what torch's kernels take at a time
_ONE_THREAD = 1 << 14  # numbers that torch does not split among threads

Gating = Callable[[Tensor], Tensor]  # [rows, 2 ffn] to [rows, ffn]


class Norms(Protocol):
    """Norms over the last axis, rounded once, after the weight."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x` [..., size] normalised, times `weight` [size]; of the kind of `x`."""
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum) of `x` and `residual` [rows, size]."""
        ...


class TorchNorms:
    """`Norms` by torch."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:  # kept in float32
            wide = x.to(weight.dtype)
            return functional.rms_norm(wide, weight.shape, weight, eps).to(x.dtype)
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.norm(total, weight, eps), total


def torch_gating(gate_up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up, [rows, ffn], of `gate_up` [rows, 2 ffn]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        gate = functional.silu(gate)
    else:
        gate = functional.gelu(gate, approximate="tanh")
    return gate.mul_(up)


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function` of `x` [rows, columns], number by number; the same shape.

    torch computes the end of a thread's share by other instructions than whole vectors, and splits
    large tensors among threads. An exponential or a power can differ there in its last bit, and a
    row would depend on how many rows are computed beside it. So `function` gets some rows at a
    time, padded with zeros to a multiple of `VECTOR_COLUMNS` columns; on a GPU, where each number
    has a thread of its own, all at once.
    """
    if x.is_cuda:
        return function(x)
    filled = functional.pad(x, (0, -x.shape[1] % VECTOR_COLUMNS))
    tiles = torch.split(filled, max(1, _ONE_THREAD // filled.shape[1]))
    return torch.cat([function(tile) for tile in tiles])[:, : x.shape[1]]
