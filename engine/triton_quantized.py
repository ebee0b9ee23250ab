"""Products with a quantised weight matrix on a GPU: int8, int4 by groups, and FP8 (E4M3).

    weight[n, k] = (value[n, k] - zero[n, k // group]) * scale[n, k // group]

Few rows (decode) are multiplied straight from the packed values, which are all that is read;
many rows (prefill) by torch, with the matrix unpacked once into its plain form. torch has no
such product for values of other kinds than the rows'. Keeps no state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.quantized_weight import Kind, QuantizedWeight
from baton.engine.triton_tile import INTERPRETED
from baton.runtime.errors import ModelError

_FUSED_ROWS = 64  # more are multiplied faster by torch, from a plain matrix
_PROGRAMS = 264  # twice the multiprocessors of an H200: fewer leave its memory idle


class TritonQuantized:
    """The `Linear` of a `QuantizedWeight` on a GPU, with an optional `bias` [out]."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, device: torch.device) -> None:
        """Raises ModelError as `quantized_matmul` does."""
        _group(weight.columns, weight.scales, weight.group)
        self._packing, self._group = weight.kind, weight.group
        self._values = weight.codes.contiguous().to(device)
        self._scales = weight.scales.contiguous().to(device)
        self._zeros = None if weight.zeros is None else weight.zeros.contiguous().to(device)
        self._order = None if weight.order is None else weight.order.to(device)
        self._bias = None if bias is None else bias.to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        x = x if self._order is None else x.index_select(1, self._order)
        given = (self._values, self._scales, self._packing, self._zeros, self._bias, self._group)
        return quantized_matmul(x, *given)


def quantized_matmul(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    packing: Kind,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """[rows, out] of `x` [rows, in] with the matrix that `values` and `scales` stand for.

    `values` are int8 [out, in], float8_e4m3fn [out, in], or for int4 uint8 [out, in / 2] with
    the even column in the low half and values from 0 to 15; `scales` [out, groups]; `zeros` of
    the same shape, None: 8 for int4, else 0. All contiguous. `group` columns share a scale, 0:
    as many for each; the last group may be cut. Raises ModelError where 16 does not divide them.
    """
    rows, depth = x.shape
    group = _group(depth, scales, group)
    if rows > _FUSED_ROWS:
        plain = dequantized(values, scales, packing, zeros, x.dtype, group)
        return functional.linear(x, plain, bias)
    if not rows:
        return x.new_empty((0, values.shape[0]))
    out = _fused(x, values, scales, packing, zeros, group)
    return out if bias is None else out + bias


def dequantized(
    values: Tensor,
    scales: Tensor,
    packing: Kind,
    zeros: Tensor | None,
    dtype: torch.dtype,
    group: int = 0,
) -> Tensor:
    """The plain matrix [out, in], rounded to `dtype`; arguments as for `quantized_matmul`."""
    width = values.shape[0]
    depth = values.shape[1] * (2 if packing == "int4" else 1)
    out = torch.empty((width, depth), dtype=dtype, device=values.device)
    block = 1024
    _unpack[(width, triton.cdiv(depth, block))](
        _as_bytes(values),
        scales,
        zeros if zeros is not None else scales,
        out,
        depth,
        _group(depth, scales, group),
        scales.shape[1],
        PACKING=packing,
        ZEROS=zeros is not None,
        BLOCK=block,
    )
    return out


def dequantized_reference(
    values: Tensor, scales: Tensor, packing: Kind, zeros: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The same in torch, in float32 until the end."""
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


def _group(depth: int, scales: Tensor, group: int) -> int:
    group = group or depth // scales.shape[1]
    if group % 16 or depth % 16 or -(-depth // group) != scales.shape[1]:
        raise ModelError(
            f"a quantised matrix of {depth} columns has {scales.shape[1]} groups: their size "
            "must be a multiple of 16 columns; quantise with groups of 16, 32, 64 or 128"
        )
    return group


def _as_bytes(values: Tensor) -> Tensor:
    """FP8 as its bits: sm_80 has no such kind of number, and the kernels decode it."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def _fused(
    x: Tensor, values: Tensor, scales: Tensor, packing: Kind, zeros: Tensor | None, group: int
) -> Tensor:
    rows, depth = x.shape
    width, groups = scales.shape
    block_k = next(size for size in (128, 64, 32, 16) if group % size == 0 == depth % size)
    if packing == "int4" and block_k == 16:  # its halves are too thin for the matrix units
        plain = dequantized(values, scales, packing, zeros, x.dtype, group)
        return functional.linear(x, plain)
    block_m = max(16, triton.next_power_of_2(rows))
    block_n = 64 if block_m < 64 else 32  # more sums than that find no registers
    blocks_k = depth // block_k
    columns = triton.cdiv(width, block_n)
    # Depends on the matrix alone. The tiles do not: a row's last bits differ with how many rows
    # stand beside it, and again beyond `_FUSED_ROWS`.
    split = max(1, min(_PROGRAMS // triton.cdiv(width, 64), blocks_k // 4))
    each = triton.cdiv(blocks_k, split)
    split = triton.cdiv(blocks_k, each)
    parts = torch.empty((split, rows, width), dtype=torch.float32, device=x.device)
    _product[(columns, split)](
        x,
        _as_bytes(values),
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
        WIDE=INTERPRETED or x.dtype == torch.float32,
        num_warps=8 if block_m == 64 else 4,
        num_stages=4,
    )
    return parts.sum(dim=0).to(x.dtype) if split > 1 else parts[0].to(x.dtype)


@triton.jit
def _decoded(value, PACKING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Float32 of int8, or of the bits of an E4M3 number: those of a float16 of 1/256 of it."""
    if PACKING == "fp8":
        bits = value.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return value.to(tl.float32)


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
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
    place = row * groups + column // group
    if ZEROS:
        value -= tl.load(zero_ptr + place, mask=inside, other=0.0).to(tl.float32)
    elif PACKING == "int4":
        value -= 8.0
    value *= tl.load(scale_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * depth + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _multiplied(x, w, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [M, K] times w [K, N], float32. The values, less their zero, are exact in bfloat16."""
    if WIDE:
        return tl.dot(x.to(tl.float32), w, input_precision="ieee")
    return tl.dot(x, w.to(x.dtype))


@triton.jit(do_not_specialize=["rows"])
def _product(  # type: ignore[no-untyped-def]
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
    WIDE: tl.constexpr,
):
    row = tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    used = column < width
    first = tl.program_id(1) * share
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(first, min(first + share, depth), BLOCK_K):
        place = column.to(tl.int64) * groups + start // group
        scale = tl.load(scale_ptr + place, mask=used, other=0.0).to(tl.float32)
        zero = tl.zeros((BLOCK_N,), dtype=tl.float32)
        if ZEROS:
            zero = tl.load(zero_ptr + place, mask=used, other=0.0).to(tl.float32)
        elif PACKING == "int4":
            zero += 8.0
        if PACKING == "int4":
            half = tl.arange(0, BLOCK_K // 2)
            source = column.to(tl.int64)[None, :] * (depth // 2) + start // 2 + half[:, None]
            packed = tl.load(value_ptr + source, mask=used[None, :], other=0)
            even = x_ptr + row * depth + start + 2 * half[None, :]
            low = (packed & 15).to(tl.float32) - zero[None, :]
            high = (packed >> 4).to(tl.float32) - zero[None, :]
            product = _multiplied(tl.load(even, mask=row < rows, other=0.0), low, WIDE)
            product += _multiplied(tl.load(even + 1, mask=row < rows, other=0.0), high, WIDE)
        else:
            step = tl.arange(0, BLOCK_K)
            source = column.to(tl.int64)[None, :] * depth + start + step[:, None]
            stored = tl.load(value_ptr + source, mask=used[None, :], other=0)
            x = tl.load(x_ptr + row * depth + start + step[None, :], mask=row < rows, other=0.0)
            product = _multiplied(x, _decoded(stored, PACKING) - zero[None, :], WIDE)
        sums += product * scale[None, :]
    target = part_ptr + tl.program_id(1).to(tl.int64) * rows * width + row * width + column[None, :]
    tl.store(target, sums, mask=(row < rows) & used[None, :])
