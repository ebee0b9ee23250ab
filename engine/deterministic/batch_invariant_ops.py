"""Elementwise functions whose value for a number does not depend on the other numbers' count.

torch computes the end of a thread's share by other instructions than whole vectors, and splits
large tensors among threads. An exponential or a power can differ there in its last bit, and a
row would depend on how many rows are computed beside it. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

VECTORS = 64  # columns: a multiple of what torch's kernels take at a time
_ONE_THREAD = 1 << 14  # numbers that torch does not split among threads


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of `x` [rows, columns], number by number; the same shape. It is given some rows
    at a time, filled up with zeros to a multiple of `VECTORS` columns; on a GPU, where each
    number has a thread of its own, all at once."""
    if x.is_cuda:
        return function(x)
    filled = functional.pad(x, (0, -x.shape[1] % VECTORS))
    tiles = torch.split(filled, max(1, _ONE_THREAD // filled.shape[1]))
    return torch.cat([function(tile) for tile in tiles])[:, : x.shape[1]]
