"""Norms and gates of bfloat16 rows, each in one pass over memory. Needs numba.

Rows are converted to float32, computed, and rounded once; torch reads and writes them five to ten
times. torch computes rows of another dtype or an odd size; up to rounding, the results are equal.
A row's result depends only on that row. The only state is norms' weights in float32.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from torch import Tensor

from baton.engine.cpu.compiled import compiled, take_threads
from baton.engine.cpu.dot_bf16 import LANES, supported
from baton.engine.cpu.row_ir import add_squares, gate_row, scale, squares
from baton.engine.model.row_ops import TorchNorms, torch_gating

_PARTS = 16  # of a call that threads share
_SHARED_NUMBERS = 1 << 16  # smaller calls use one thread


class NumbaNorms(TorchNorms):
    """`TorchNorms`, compiled."""

    def __init__(self) -> None:
        self._wide_weights: dict[int, tuple[Tensor, Tensor]] = {}

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = weight.shape[0]
        if x.dim() not in (2, 3) or not fits(x, size):
            return super().norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        heads = x.shape[1] if x.dim() == 3 else 1
        strides = 2 * x.stride(0), 2 * x.stride(1) if x.dim() == 3 else 0
        wide = self._wide(weight).data_ptr()
        numbers = x.data_ptr(), *strides, heads, size, wide, eps, out.data_ptr()
        if shared(x):
            _norm_shared(x.shape[0], *numbers)
        else:
            _norm_rows(0, x.shape[0], *numbers)
        return out

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows, size = x.shape
        if not (fits(x, size) and fits(residual, size)):
            return super().add_norm(x, residual, weight, eps)
        out = torch.empty(2, rows, size, dtype=x.dtype)
        operands = x.data_ptr(), 2 * x.stride(0), residual.data_ptr(), 2 * residual.stride(0)
        constants = size, self._wide(weight).data_ptr(), eps
        results = out[0].data_ptr(), out[1].data_ptr()
        if shared(x):
            _add_norm_shared(rows, *operands, *constants, *results)
        else:
            add_norm_rows(0, rows, *operands, *constants, *results)
        return out[0], out[1]

    def _wide(self, weight: Tensor) -> Tensor:
        """Return a norm's weight in float32, converted at its first use. The original is kept too,
        since its address identifies it."""
        found = self._wide_weights.get(weight.data_ptr())
        if found is None:
            found = weight.to(torch.float32).contiguous(), weight
            self._wide_weights[weight.data_ptr()] = found
        return found[0]


def silu_gate(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [rows, ffn], of `gate_up` [rows, 2 ffn]."""
    rows, both = gate_up.shape
    if both % 2 or not fits(gate_up, both // 2):
        return torch_gating(gate_up, "silu")
    out = torch.empty(rows, both // 2, dtype=gate_up.dtype)
    numbers = gate_up.data_ptr(), 2 * gate_up.stride(0), both // 2, out.data_ptr()
    if shared(gate_up):
        _gate_shared(rows, *numbers)
    else:
        _gate_rows(0, rows, *numbers)
    return out


def fits(x: Tensor, size: int) -> bool:
    """Return whether rows of `x`, `size` numbers each, can be read as vectors of 16."""
    plain = x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(-1) == 1
    return plain and size % LANES == 0 and supported()


def shared(x: Tensor) -> bool:
    """Return whether threads share the work on `x`; if so, set their number."""
    if x.numel() < _SHARED_NUMBERS:
        return False
    take_threads()
    return True


def warm_up() -> None:
    """Compile before serving."""
    weight = torch.ones(LANES)
    for rows in (1, _SHARED_NUMBERS // LANES):
        x = torch.zeros(rows, LANES, dtype=torch.bfloat16)
        norms = NumbaNorms()
        norms.add_norm(x, x, weight, 1.0)
        norms.norm(x, weight, 1.0)
        silu_gate(torch.zeros(rows, 2 * LANES, dtype=torch.bfloat16))


def _factor(squares, size, eps):  # type: ignore[no-untyped-def] # numba infers types
    """Return the norm's factor on a row of `size` numbers with this sum of squares."""
    return np.float32(1.0 / math.sqrt(squares / size + eps))


def _norm(  # type: ignore[no-untyped-def] # numba infers types
    first, end, x, row_stride, head_stride, heads, size, weight, eps, out
):
    """Normalise rows `first` to `end` of bfloat16 `x` [rows, heads, size] into `out`. Here and
    below, matrices are addresses, norms' weights are float32, and strides are in bytes."""
    vectors = size // LANES
    for row in range(first, end):
        for head in range(heads):
            at = x + row * row_stride + head * head_stride
            factor = norm_factor(squares(at, vectors), size, eps)
            scale(at, weight, out + (row * heads + head) * size * 2, vectors, factor)


def _add_norm(  # type: ignore[no-untyped-def] # numba infers types
    first, end, x, x_stride, residual, residual_stride, size, weight, eps, out, total
):
    """Write `x` + `residual` into `total` [rows, size], rounded, and the norm of `total` into
    `out`."""
    vectors = size // LANES
    for row in range(first, end):
        at, sums = x + row * x_stride, total + row * size * 2
        found = add_squares(at, residual + row * residual_stride, sums, vectors)
        scale(sums, weight, out + row * size * 2, vectors, norm_factor(found, size, eps))


def _gate(first, end, x, stride, size, out):  # type: ignore[no-untyped-def] # numba infers types
    """Gate bfloat16 `x` [rows, gate then up] into `out` [rows, size]."""
    for row in range(first, end):
        gate_row(x + row * stride, x + row * stride + size * 2, out + row * size * 2, size // LANES)


norm_factor = compiled(_factor)
_norm_rows, add_norm_rows, _gate_rows = compiled(_norm), compiled(_add_norm), compiled(_gate)


# The same for several threads. Numba's cache distinguishes compilations of a function only by its
# code, so these are separate functions.
def _share_norm(  # type: ignore[no-untyped-def] # numba infers types
    rows, x, row_stride, head_stride, heads, size, weight, eps, out
):
    for part in numba.prange(_PARTS):
        first, end = part * rows // _PARTS, (part + 1) * rows // _PARTS
        _norm_rows(first, end, x, row_stride, head_stride, heads, size, weight, eps, out)


def _share_add_norm(  # type: ignore[no-untyped-def] # numba infers types
    rows, x, x_stride, residual, residual_stride, size, weight, eps, out, total
):
    for part in numba.prange(_PARTS):
        first, end = part * rows // _PARTS, (part + 1) * rows // _PARTS
        add_norm_rows(
            first, end, x, x_stride, residual, residual_stride, size, weight, eps, out, total
        )


def _share_gate(rows, x, stride, size, out):  # type: ignore[no-untyped-def] # numba infers types
    for part in numba.prange(_PARTS):
        first, end = part * rows // _PARTS, (part + 1) * rows // _PARTS
        _gate_rows(first, end, x, stride, size, out)


_norm_shared = compiled(_share_norm, parallel=True)
_add_norm_shared = compiled(_share_add_norm, parallel=True)
_gate_shared = compiled(_share_gate, parallel=True)
