"""Batch-invariant matrix products on a GPU: a row's bits do not depend on other rows.

    out[b, m, n] = sum of x[b, m, k] * w[b, k, n] over k, from the first to the last

A library chooses tiles, and splits of the inner dimension, by the number of rows. Here tiles
depend only on the matrix and nothing is split, so every number is one sum in one order, as in
batch-invariant kernels (He et al. 2025, "Defeating Nondeterminism in LLM Inference"). One row
costs as much as 64, and large products are slower than the library's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.triton.tile import INTERPRETED, precision, product

# Columns of a tile: the largest number for which one tile of rows has at least _PROGRAMS programs.
_COLUMNS = (128, 64, 32)
_PROGRAMS = 96


@dataclass(frozen=True, slots=True)
class FixedTileLinear:
    """A batch-invariant `Linear`: its tiles do not depend on the number of rows."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, in]; returns [rows, out]."""
        return fixed_products(x[None], self.weight.T[None], self.bias)[0]


def fixed_products(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the products [batch, rows, out] of `x` [batch, rows, in] and `weights` [batch, in,
    out], with any strides. `bias` [out] is added before the result is rounded to the dtype of `x`.
    The result is a view of [rows, batch, out]. Sums are float32."""
    batch, rows, depth = x.shape
    width = weights.shape[2]
    out = x.new_empty((rows, batch, width)).transpose(0, 1)
    if not rows:
        return out
    wide = x.dtype == torch.float32
    block_n = next((size for size in _COLUMNS if width // size >= _PROGRAMS), _COLUMNS[-1])
    block_k = 32 if wide else 64
    grid = (triton.cdiv(rows, 64), triton.cdiv(width, block_n), batch)
    fixed_kernel[grid](
        out,
        x,
        weights,
        bias,
        rows,
        width,
        depth,
        *_strides(out)[:2],
        *_strides(x),
        *_strides(weights),
        BIAS=bias is not None,
        BLOCK_M=64,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        WHOLE=depth % block_k == 0,
        PRECISION=precision(x.dtype),
        INTERPRETED=INTERPRETED,
        num_warps=4,
        num_stages=2 if wide else 4,
    )
    return out


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides, 0 for the axis of a batch of one: its stride would depend on the number
    of rows, and Triton compiles another kernel for strides that 16 does not divide."""
    return (x.stride(0) if x.shape[0] > 1 else 0, *x.stride()[1:])


@triton.jit(do_not_specialize=["rows"])
def fixed_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    out,
    x,
    weights,
    bias,
    rows,
    width,
    depth,
    stride_out_batch,
    stride_out_row,
    stride_x_batch,
    stride_x_row,
    stride_x_depth,
    stride_batch,
    stride_depth,
    stride_column,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,  # whether tiles divide the depth
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    step = tl.arange(0, BLOCK_K)
    x_tile = x + batch * stride_x_batch + row * stride_x_row + step[None, :] * stride_x_depth
    w_tile = weights + batch * stride_batch + column * stride_column + step[:, None] * stride_depth
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        x_held, w_held = row < rows, column < width
        if not WHOLE:
            x_held = x_held & (start + step < depth)[None, :]
            w_held = w_held & (start + step < depth)[:, None]
        a = tl.load(x_tile, mask=x_held, other=0.0)
        b = tl.load(w_tile, mask=w_held, other=0.0)
        sums = product(a, b, sums, PRECISION, INTERPRETED)
        x_tile += BLOCK_K * stride_x_depth
        w_tile += BLOCK_K * stride_depth
    if BIAS:
        sums += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    target = out + batch * stride_out_batch + row * stride_out_row + column
    tl.store(target, sums.to(out.dtype.element_ty), mask=(row < rows) & (column < width))
