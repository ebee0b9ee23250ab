"""Products with a quantised weight matrix on a GPU: int8, int4 by groups, and FP8 (E4M3).

    weight[n, k] = (value[n, k] - zero[n, k // group]) * scale[n, k // group]

Few rows (decode) are multiplied directly from the packed values, so that only those are read. For
many rows (prefill) the matrix is first dequantised and then multiplied by torch, which has no
product of rows with values of another dtype. The module keeps no state.
"""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.model.quantized_weight import CodeDtype, QuantizedWeight
from baton.engine.triton.linear import fixed_products
from baton.engine.triton.tile import INTERPRETED, precision, product
from baton.runtime.errors import ModelError

_FUSED_ROWS = 64  # for more, torch is faster
_PROGRAMS = 264  # twice the multiprocessors of an H200, to use its bandwidth


class TritonQuantized:
    """The `Linear` of a `QuantizedWeight` on a GPU, with an optional `bias` [out]."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, device: torch.device) -> None:
        """Copy the weight to `device`. Raises ModelError like `quantized_matmul`."""
        self.fixed = False
        checked_group(weight.columns, weight.scales, weight.group)
        self._packing, self._group = weight.code_dtype, weight.group
        self.values = weight.codes.contiguous().to(device)
        self._scales = weight.scales.contiguous().to(device)
        self._zeros = None if weight.zeros is None else weight.zeros.contiguous().to(device)
        self._order = None if weight.order is None else weight.order.to(device)
        self._bias = None if bias is None else bias.to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, in]; returns [rows, out]."""
        x = x if self._order is None else x.index_select(1, self._order)
        given = (self.values, self._scales, self._packing, self._zeros, self._bias, self._group)
        return quantized_matmul(x, *given, fixed=self.fixed)

    def batch_invariant(self) -> TritonQuantized:
        """Return the same matrix with batch-invariant products."""
        apart = copy(self)
        apart.fixed = True
        return apart


def quantized_matmul(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    packing: CodeDtype,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    group: int = 0,
    *,
    fixed: bool = False,
) -> Tensor:
    """Multiply `x` [rows, in] by the matrix of `values` and `scales`; returns [rows, out].

    `values` are int8 [out, in], float8_e4m3fn [out, in], or for int4 uint8 [out, in / 2] with
    the even column in the low half and values from 0 to 15; `scales` [out, groups]; `zeros` of
    the same shape, None: 8 for int4, else 0. All are contiguous. `group` columns share a scale (0:
    groups of equal size); the last group may be shorter. `fixed`: a row's bits do not depend on
    other rows. Raises ModelError if 16 does not divide a group.
    """
    rows, depth = x.shape
    group = checked_group(depth, scales, group)
    block_k = tile_depth(depth, group)
    thin = packing == "int4" and block_k == 16  # halves too small for matrix units
    if thin or (rows > _FUSED_ROWS and not fixed):
        plain = dequantized(values, scales, packing, zeros, x.dtype, group)
        if fixed:
            return fixed_products(x[None], plain.T[None], bias)[0]
        return functional.linear(x, plain, bias)
    if not rows:
        return x.new_empty((0, values.shape[0]))
    out = _fused(x, values, scales, packing, zeros, group, fixed)
    return out if bias is None else out + bias


def tile_depth(depth: int, group: int) -> int:
    """Return how many columns are multiplied at a time, within one group."""
    return next(size for size in (128, 64, 32, 16) if group % size == 0 == depth % size)


def dequantized(
    values: Tensor,
    scales: Tensor,
    packing: CodeDtype,
    zeros: Tensor | None,
    dtype: torch.dtype,
    group: int = 0,
) -> Tensor:
    """Return the matrix [out, in], rounded to `dtype`; for arguments see `quantized_matmul`."""
    width = values.shape[0]
    depth = values.shape[1] * (2 if packing == "int4" else 1)
    out = torch.empty((width, depth), dtype=dtype, device=values.device)
    block = 1024
    _unpack[(width, triton.cdiv(depth, block))](
        as_bytes(values),
        scales,
        zeros if zeros is not None else scales,
        out,
        depth,
        checked_group(depth, scales, group),
        scales.shape[1],
        PACKING=packing,
        ZEROS=zeros is not None,
        BLOCK=block,
    )
    return out


def dequantized_reference(
    values: Tensor, scales: Tensor, packing: CodeDtype, zeros: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Same as `dequantized`, in torch, in float32 until the end."""
    if packing == "int4":
        plain = torch.stack((values & 15, values >> 4), dim=-1).flatten(1).to(torch.float32)
    else:
        plain = values.to(torch.float32)
    grouped = plain.view(plain.shape[0], scales.shape[1], -1)
    if zeros is not None:
        grouped = grouped - zeros.to(torch.float32)[:, :, None]
    elif packing == "int4":
        grouped = grouped - 8
    return (grouped * scales.to(torch.float32)[:, :, None]).flatten(1).to(dtype)


def checked_group(depth: int, scales: Tensor, group: int) -> int:
    group = group or depth // scales.shape[1]
    if group % 16 or depth % 16 or -(-depth // group) != scales.shape[1]:
        raise ModelError(
            f"a quantised matrix of {depth} columns has {scales.shape[1]} groups: their size "
            "must be a multiple of 16 columns; quantise with groups of 16, 32, 64 or 128"
        )
    return group


def as_bytes(values: Tensor) -> Tensor:
    """Return FP8 as bits, which the kernels decode, since sm_80 has no such dtype."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def _fused(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    packing: CodeDtype,
    zeros: Tensor | None,
    group: int,
    fixed: bool,
) -> Tensor:
    rows, depth = x.shape
    width, groups = scales.shape
    block_k = tile_depth(depth, group)
    block_m = _FUSED_ROWS if fixed else max(16, triton.next_power_of_2(rows))
    block_n = 64 if block_m < 64 else 32  # more sums exceed the registers
    blocks_k = depth // block_k
    columns = triton.cdiv(width, block_n)
    # `split` depends only on the matrix. Unless `fixed`, the tiles also depend on the number of
    # rows, so a row's last bits change with it, and again beyond `_FUSED_ROWS`. If `fixed`,
    # nothing is split, because torch's order of adding parts depends on their number.
    split = 1 if fixed else max(1, min(_PROGRAMS // triton.cdiv(width, 64), blocks_k // 4))
    each = triton.cdiv(blocks_k, split)
    split = triton.cdiv(blocks_k, each)
    parts = torch.empty((split, rows, width), dtype=torch.float32, device=x.device)
    _product[(columns, split, triton.cdiv(rows, block_m))](
        x,
        as_bytes(values),
        scales,
        zeros if zeros is not None else scales,
        parts,
        rows,
        width,
        depth,
        groups,
        group,
        each * block_k,
        PACKING=packing,
        ZEROS=zeros is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PRECISION=precision(x.dtype),
        INTERPRETED=INTERPRETED,
        num_warps=8 if block_m == 64 else 4,
        num_stages=4,
    )
    return parts.sum(dim=0).to(x.dtype) if split > 1 else parts[0].to(x.dtype)


@triton.jit
def _decoded(value, PACKING: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    """Convert int8, or the bits of E4M3 (those of a float16 256 times smaller), to float32."""
    if PACKING == "fp8":
        bits = value.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return value.to(tl.float32)


@triton.jit
def _unpack(  # type: ignore[no-untyped-def] # Triton infers types
    value_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    depth,
    group,
    groups,
    PACKING: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < depth
    if PACKING == "int4":
        packed = tl.load(value_ptr + row * (depth // 2) + column // 2, mask=inside, other=0)
        value = ((packed >> ((column % 2) * 4).to(tl.uint8)) & 15).to(tl.float32)
    else:
        stored = tl.load(value_ptr + row * depth + column, mask=inside, other=0)
        value = _decoded(stored, PACKING)
    offset = row * groups + column // group
    if ZEROS:
        value -= tl.load(zero_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    elif PACKING == "int4":
        value -= 8.0
    value *= tl.load(scale_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * depth + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quantized_sums(  # type: ignore[no-untyped-def] # Triton infers types
    x_row,  # pointers [BLOCK_M, 1] to rows of x
    held,  # bool [BLOCK_M, 1]: which of them exist
    value_ptr,
    scale_ptr,
    zero_ptr,
    column,  # int32 [BLOCK_N]: rows of the matrix
    width,
    depth,
    groups,
    group,
    first,  # `first` to `end` of `depth` are multiplied
    end,
    PACKING: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return x times the matrix of values, scales and zeros, float32 [BLOCK_M, BLOCK_N]. Values
    minus their zero point are exact in bfloat16."""
    used = column < width
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(first, end, BLOCK_K):
        offset = column.to(tl.int64) * groups + start // group
        scale = tl.load(scale_ptr + offset, mask=used, other=0.0).to(tl.float32)
        zero = tl.zeros((BLOCK_N,), dtype=tl.float32)
        if ZEROS:
            zero = tl.load(zero_ptr + offset, mask=used, other=0.0).to(tl.float32)
        elif PACKING == "int4":
            zero += 8.0
        part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if PACKING == "int4":
            half = tl.arange(0, BLOCK_K // 2)
            source = column.to(tl.int64)[None, :] * (depth // 2) + start // 2 + half[:, None]
            packed = tl.load(value_ptr + source, mask=used[None, :], other=0)
            x = tl.load(x_row + start + 2 * half[None, :], mask=held, other=0.0)
            low = ((packed & 15).to(tl.float32) - zero[None, :]).to(x.dtype)
            part = product(x, low, part, PRECISION, INTERPRETED)
            x = tl.load(x_row + start + 2 * half[None, :] + 1, mask=held, other=0.0)
            high = ((packed >> 4).to(tl.float32) - zero[None, :]).to(x.dtype)
            part = product(x, high, part, PRECISION, INTERPRETED)
        else:
            step = tl.arange(0, BLOCK_K)
            source = column.to(tl.int64)[None, :] * depth + start + step[:, None]
            stored = tl.load(value_ptr + source, mask=used[None, :], other=0)
            x = tl.load(x_row + start + step[None, :], mask=held, other=0.0)
            plain = (_decoded(stored, PACKING) - zero[None, :]).to(x.dtype)
            part = product(x, plain, part, PRECISION, INTERPRETED)
        sums += part * scale[None, :]
    return sums


@triton.jit(do_not_specialize=["rows"])
def _product(  # type: ignore[no-untyped-def] # Triton infers types
    x_ptr,
    value_ptr,
    scale_ptr,
    zero_ptr,
    part_ptr,
    rows,
    width,
    depth,
    groups,
    group,
    share,  # of `depth`: what one program multiplies
    PACKING: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * share
    given = x_ptr + row * depth
    # fmt: off
    sums = quantized_sums(
        given, row < rows, value_ptr, scale_ptr, zero_ptr, column, width, depth, groups, group,
        first, min(first + share, depth),
        PACKING, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, INTERPRETED)
    # fmt: on
    target = part_ptr + tl.program_id(1).to(tl.int64) * rows * width + row * width + column[None, :]
    tl.store(target, sums, mask=(row < rows) & (column < width)[None, :])
