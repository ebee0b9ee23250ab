"""Root-mean-square norm on a GPU, with the preceding addition in the same pass.

One program normalises one row, or some short ones, in registers, so that each value is read once
and written once. Programs depend on the size alone, so a row has the same bits in every batch. The
torch reference is `rms_norm` of the sum. The module knows no layers and keeps no state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024  # values per program, unless a row is longer
_THREAD_VALUES = 16  # fewer: many rows take longer; more: one row does
_MAX_WARPS = 16


class TritonNorms:
    """`Norms` on a GPU."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Divide `x` [..., size] by its root mean square; multiply by (`offset` + `weight` [size]).

    Zhang and Sennrich 2019, arXiv:1910.07467; `offset` is 1 in Gemma. Computed in float32,
    rounded once. `x` has two or three axes, the last one contiguous; the result is contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, offset, out, None)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (norm of the sum, the sum) of `x` and `residual`, both [rows, size] and contiguous.

    The sum is rounded to its dtype before it is normalised, as with two operations.
    """
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, eps, offset, out, total)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    out: Tensor,
    total: Tensor | None,
) -> None:
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * heads
    if not rows:
        return
    block = triton.next_power_of_2(size)
    tile_rows = max(1, min(_TILE // block, 16))
    _norm[(triton.cdiv(rows, tile_rows),)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        total if total is not None else out,
        rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        eps,
        offset,
        HEADS=heads,
        SIZE=size,
        BLOCK=block,
        ROWS=tile_rows,
        ADD=residual is not None,
        num_warps=max(1, min(tile_rows * block // (32 * _THREAD_VALUES), _MAX_WARPS)),
    )


@triton.jit(do_not_specialize=["rows"])
def _norm(  # type: ignore[no-untyped-def] # Triton infers types
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    rows,
    row_stride,
    head_stride,
    eps,
    offset,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < SIZE)
    source = (row // HEADS) * row_stride + (row % HEADS) * head_stride + column
    dense = row * SIZE + column
    wide = tl.load(x_ptr + source, mask=inside, other=0.0).to(tl.float32)
    # Before the sum, which every later load would wait for.
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual_ptr + dense, mask=inside, other=0.0).to(tl.float32)
        total = wide.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + dense, total, mask=inside)
        wide = total.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1)[:, None] / SIZE
    normed = wide * tl.rsqrt(mean + eps) * (weight + offset)
    tl.store(out_ptr + dense, normed.to(out_ptr.dtype.element_ty), mask=inside)
