"""The inner loop of the attention kernels: a tile of queries over a range of paged KV.

Softmax is computed online (Milakov and Gimelshein 2018, arXiv:1805.02867), tile by tile as in
FlashAttention (Dao et al. 2022, arXiv:2205.14135), in powers of two. Sums and products are float32.
Tiles of KV begin at multiples of their size, counted from the sequence's first token, so a row
reads the same tiles in the same order for every division into chunks. In eight bits, the scales of
keys multiply scores, and those of values multiply weights. The module launches and owns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from baton.engine.triton.kv_quant import plain, unit

# Triton's interpreter multiplies bfloat16 matrices wrongly, and sums a row's products in an order
# that depends on the row's index. Its operands are therefore widened until neither has an effect.
INTERPRETED = bool(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
# Replaces minus infinity, whose differences are NaN. It is the best score of a row before its
# first token; the first real score then scales the row's earlier sums to zero.
NO_SCORE = tl.constexpr(-1e30)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile of a kernel, `rows` of queries by `tokens` of KV, and settings of Triton."""

    rows: int
    tokens: int
    warps: int
    stages: int
    registers: int = 0  # of a thread, at most; 0: the compiler's choice


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def precision(dtype: torch.dtype) -> str:
    """Return the precision for `tl.dot`: float32 stays float32; Triton's default is tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def options(tiles: Tiles) -> dict[str, Any]:
    """Return the keyword arguments of a launch."""
    limit = {"maxnreg": tiles.registers} if tiles.registers else {}
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, **limit}


@triton.jit
def product(  # type: ignore[no-untyped-def] # Triton infers types
    a,  # [m, k]
    b,  # [k, n]
    onto,  # float32 [m, n]
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return `onto` + a @ b, summed in float32."""
    if INTERPRETED:
        wide = tl.dot(a.to(tl.float32).to(tl.float64), b.to(tl.float32).to(tl.float64))
        return onto + wide.to(tl.float32)
    else:
        return tl.dot(a, b, onto, input_precision=PRECISION)


@triton.jit
def logits(  # type: ignore[no-untyped-def] # Triton infers types
    scores,  # float32: products of queries and keys
    scale,  # float: multiplies them
    SOFT_CAP: tl.constexpr,  # float, 0: none
):
    """Return scores as exponents of two, capped smoothly as in Gemma 2: cap * tanh(x / cap)."""
    if SOFT_CAP == 0:
        return scores * (scale * LOG2_E)
    else:
        # tanh(x) = 1 - 2 / (e^2x + 1) is exact at both ends, where e^2x is zero or infinite.
        grown = tl.exp2(scores * (scale * (2 * LOG2_E / SOFT_CAP)))
        return (SOFT_CAP * LOG2_E) * (1 - 2 / (grown + 1))


@triton.jit
def weigh(best, total, scores):  # type: ignore[no-untyped-def] # Triton infers types
    """Compute one step of the online softmax over `scores` [rows, tokens]. Returns each row's new
    best score and sum, the factor on earlier sums, and the weights [rows, tokens]."""
    highest = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - highest[:, None])
    shrink = tl.exp2(best - highest)
    return highest, total * shrink + tl.sum(weights, axis=1), shrink, weights


@triton.jit
def load_scales(  # type: ignore[no-untyped-def] # Triton infers types
    scale_ptr,  # pointers [tokens] to the scales of keys
    stride_kv,
    held,  # bool [tokens]: the others are 0
    MASKED: tl.constexpr,
    CODES: tl.constexpr,
):
    """Load the scales of a tile's keys and values, float32 [tokens] each."""
    if MASKED:
        keys = tl.load(scale_ptr, mask=held, other=0.0)
        values = tl.load(scale_ptr + stride_kv, mask=held, other=0.0)
    else:
        keys, values = tl.load(scale_ptr), tl.load(scale_ptr + stride_kv)
    return unit(keys, CODES), unit(values, CODES)


@triton.jit
def scaled(weights, value, scales, kind: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    """Return `weights` [rows, tokens] and `value` [tokens, dim], one of them times `scales`
    [tokens]. `kind` is the dtype of their product."""
    if kind == tl.float16:  # its range is too small for weights times scales
        return weights, (value.to(tl.float32) * scales[:, None]).to(tl.float16)
    else:
        return weights * scales[None, :], value


# fmt: off
@triton.jit
def attend_stretch(  # type: ignore[no-untyped-def] # Triton infers types
    mixed,  # float32 [rows, DIM_PAD]: values so far, weighted
    best,  # float32 [rows]: highest score so far, as an exponent of two
    total,  # float32 [rows]: sum of weights so far
    query,  # [rows, DIM_PAD], zero beyond DIM
    positions,  # int32 [rows]: of the rows' tokens
    low, high,  # the range is [low, high), `low` a multiple of TOKENS
    oldest,  # no row attends to a token before it; its block may be gone
    keys, values,  # pointers to [block, ., token, dim] of one head and layer
    scales,  # pointer to [block, ., token] of the same head's keys; None: unquantised
    table,  # pointer to the sequence's block table
    stride_block,  # int64: a pool has more than 2^31 elements
    stride_token, stride_scale_block, stride_scale_kv,
    scale,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,  # whether a row may not attend to a token of the range
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, CODES: tl.constexpr,
):
    dims = tl.arange(0, DIM_PAD)
    for begin in range(low, high, TOKENS):
        tokens = begin + tl.arange(0, TOKENS)
        held = (tokens >= oldest) & (tokens < high)
        if MASKED:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=held, other=0)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE)
        offsets = blocks.to(tl.int64) * stride_block + (tokens % BLOCK_SIZE) * stride_token
        cells = offsets[:, None] + dims[None, :]
        if MASKED or DIM != DIM_PAD:
            there = (dims < DIM)[None, :]
            if MASKED:
                there = held[:, None] & there
            key = tl.load(keys + cells, mask=there, other=0.0)
            value = tl.load(values + cells, mask=there, other=0.0)
        else:
            key = tl.load(keys + cells)
            value = tl.load(values + cells)
        if CODES != "":
            near = scales + blocks.to(tl.int64) * stride_scale_block + tokens % BLOCK_SIZE
            key_scales, value_scales = load_scales(near, stride_scale_kv, held, MASKED, CODES)
        scores = tl.zeros([query.shape[0], TOKENS], tl.float32)
        key = tl.trans(plain(key, query.dtype, CODES, INTERPRETED))
        scores = product(query, key, scores, PRECISION, INTERPRETED)
        if CODES != "":
            scores = scores * key_scales[None, :]
        scores = logits(scores, scale, SOFT_CAP)
        if MASKED:
            seen = held[None, :] & (tokens[None, :] <= positions[:, None])
            if WINDOW > 0:
                seen = seen & (tokens[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, NO_SCORE)
        best, total, shrink, weights = weigh(best, total, scores)
        value = plain(value, query.dtype, CODES, INTERPRETED)
        if CODES != "":
            weights, value = scaled(weights, value, value_scales, query.dtype)
        weights = weights.to(query.dtype)
        mixed = product(weights, value, mixed * shrink[:, None], PRECISION, INTERPRETED)
    return mixed, best, total
# fmt: on
