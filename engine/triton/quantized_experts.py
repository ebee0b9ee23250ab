"""Grouped product with quantised experts on a GPU: rows sorted by expert, all in one launch.

Same as `experts`, for matrices that are read as codes and decoded in registers with the arithmetic
of `quantized`. Values are immutable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.model.quantized_weight import CodeDtype, QuantizedWeight
from baton.engine.triton.experts import tile_of, tile_rows_for
from baton.engine.triton.quantized import as_bytes, checked_group, quantized_sums, tile_depth
from baton.engine.triton.tile import INTERPRETED, precision
from baton.runtime.errors import ModelError

_MAX_TILE_ROWS = 64  # of a tile


@dataclass(frozen=True, slots=True)
class StackedCodes:
    """One matrix [out, in] per expert, all in one format; for the fields see `QuantizedWeight`."""

    code_dtype: CodeDtype
    codes: Tensor  # [experts, out, in], of int4 uint8 [experts, out, in / 2], FP8 as its bits
    scales: Tensor  # float32 [experts, out, groups]
    zeros: Tensor | None  # int16 [experts, out, groups]
    group: int

    def __len__(self) -> int:
        return len(self.codes)


def stacked_codes(
    weights: Iterable[QuantizedWeight], count: int, device: torch.device
) -> StackedCodes:
    """Copy `count` matrices to `device`, one by one. Raises ModelError if the kernel does not
    support them: different formats, permuted columns, groups that 16 (int4: 32) does not
    divide."""
    stack: StackedCodes | None = None
    for index, weight in enumerate(weights):
        if stack is None:
            stack = _allocate(weight, count, device)
        zeros = (weight.zeros is None) == (stack.zeros is None)
        alike = (weight.code_dtype, weight.group) == (stack.code_dtype, stack.group)
        alike = alike and weight.scales.shape == stack.scales.shape[1:]
        if weight.order is not None or not zeros or not alike:
            raise ModelError(
                f"expert {index} has another quantisation format than expert 0, or permuted "
                "columns (GPTQ's act-order), which a GPU does not support; set worker.device to cpu"
            )
        stack.codes[index].copy_(as_bytes(weight.codes))
        stack.scales[index].copy_(weight.scales)
        if stack.zeros is not None and weight.zeros is not None:
            stack.zeros[index].copy_(weight.zeros)
    assert stack is not None
    return stack


def _allocate(weight: QuantizedWeight, count: int, device: torch.device) -> StackedCodes:
    group = checked_group(weight.columns, weight.scales, weight.group)
    if weight.code_dtype == "int4" and tile_depth(weight.columns, group) < 32:
        raise ModelError(
            f"experts of {weight.columns} columns in int4 with groups of {group} do not run on a "
            "GPU: 32 must divide both; set worker.device to cpu, or quantise with other groups"
        )

    def allocate(part: Tensor) -> Tensor:
        return torch.empty((count, *part.shape), dtype=part.dtype, device=device)

    zeros = None if weight.zeros is None else allocate(weight.zeros)
    codes = allocate(as_bytes(weight.codes))
    return StackedCodes(weight.code_dtype, codes, allocate(weight.scales), zeros, weight.group)


def quantized_expert_matmul(
    x: Tensor,
    weights: StackedCodes,
    offsets: Tensor,
    source: Tensor | None = None,
    tile_rows: int = 0,
) -> Tensor:
    """Same as `experts.expert_matmul`, with quantised `weights`."""
    rows = x.shape[0] if source is None else source.shape[0]
    experts, width, groups = weights.scales.shape
    depth = x.shape[1]
    out = x.new_empty((rows, width))
    if not rows:
        return out
    group = weights.group or depth
    block_m = tile_rows or min(_MAX_TILE_ROWS, tile_rows_for(rows, experts))
    block_n = 64 if block_m < 64 else 32  # more sums exceed the registers
    tiles = min(triton.cdiv(rows, block_m) + experts, rows)  # an upper bound
    grouped_quantized[(triton.cdiv(width, block_n), tiles)](
        x,
        weights.codes,
        weights.scales,
        weights.zeros if weights.zeros is not None else weights.scales,
        offsets,
        source if source is not None else offsets,
        out,
        width,
        depth,
        groups,
        group,
        EXPERTS=experts,
        EXPERTS_UP=triton.next_power_of_2(experts),
        GATHER=source is not None,
        PACKING=weights.code_dtype,
        ZEROS=weights.zeros is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=tile_depth(depth, group),
        PRECISION=precision(x.dtype),
        INTERPRETED=INTERPRETED,
        num_warps=8 if block_m == 64 else 4,
        num_stages=4,
    )
    return out


@triton.jit
def grouped_quantized(  # type: ignore[no-untyped-def] # Triton infers types
    x_ptr,
    value_ptr,
    scale_ptr,
    zero_ptr,
    offset_ptr,
    source_ptr,
    out_ptr,
    width,
    depth,
    groups,
    group,
    EXPERTS: tl.constexpr,
    EXPERTS_UP: tl.constexpr,
    GATHER: tl.constexpr,
    PACKING: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    expert, begin, end = tile_of(offset_ptr, EXPERTS, EXPERTS_UP, BLOCK_M)
    if expert < EXPERTS:
        row = begin + tl.arange(0, BLOCK_M)
        inside = row < end
        source = row.to(tl.int64)
        if GATHER:
            source = tl.load(source_ptr + row, mask=inside, other=0)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        before = expert.to(tl.int64) * width  # rows of other experts' matrices
        wide = depth // 2 if PACKING == "int4" else depth
        # fmt: off
        sums = quantized_sums(
            x_ptr + source[:, None] * depth, inside[:, None],
            value_ptr + before * wide, scale_ptr + before * groups, zero_ptr + before * groups,
            column, width, depth, groups, group, 0, depth,
            PACKING, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, INTERPRETED)
        # fmt: on
        target = out_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
        written = inside[:, None] & (column < width)[None, :]
        tl.store(target, sums.to(out_ptr.dtype.element_ty), mask=written)
