"""Row operations in torch: norms, gates, and element-wise functions.

A backend may have its own norms and gates; these are the reference. Norms are root-mean-square
norms (Zhang and Sennrich 2019, arXiv:1910.07467). The module keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.spec.families import Activation

VECTOR_COLUMNS = 64  # a multiple of torch's vector length
_ONE_THREAD = 1 << 14  # numbers that torch does not split among threads

Gating = Callable[[Tensor], Tensor]  # [rows, 2 ffn] to [rows, ffn]


class Norms(Protocol):
    """The interface of norms over the last axis, which round once, after the weight."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise `x` [..., size] and multiply by `weight` [size]. Returns the dtype of `x`."""
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, the sum) of `x` and `residual` [rows, size]."""
        ...


class TorchNorms:
    """`Norms` in torch."""

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
    """Return act(gate) * up, [rows, ffn], of `gate_up` [rows, 2 ffn]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        gate = functional.silu(gate)
    else:
        gate = functional.gelu(gate, approximate="tanh")
    return gate.mul_(up)


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an element-wise `function` to `x` [rows, columns] independently of other rows.

    torch divides large tensors among threads, and computes the end of a thread's share with other
    instructions than whole vectors. The last bit of an exponential or a power can differ there, so
    a row would depend on the number of rows beside it. On a CPU, `function` therefore gets some
    rows at a time, padded with zeros to a multiple of `VECTOR_COLUMNS` columns; a GPU computes
    each number in a thread of its own and gets all rows at once.
    """
    if x.is_cuda:
        return function(x)
    filled = functional.pad(x, (0, -x.shape[1] % VECTOR_COLUMNS))
    tiles = torch.split(filled, max(1, _ONE_THREAD // filled.shape[1]))
    return torch.cat([function(tile) for tile in tiles])[:, : x.shape[1]]
