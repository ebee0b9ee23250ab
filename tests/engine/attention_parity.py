"""The attention kernels against attention written out in float64, on any device.

A check draws fresh inputs, and returns its error (of its worst row, the norm of the difference
over that of the truth) and the largest that is allowed. The pool's blocks are scattered, and hold
NaN wherever a kernel has no business; results are NaN until they are written. Latent attention has
a script of its own, `latent_parity.py`; so have the write of KV and whole steps, `step_parity.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from parity import Check, error, noticed
from torch import Tensor

from baton.engine.triton.decode import (
    Splits,
    decode_attention,
    decode_tiles,
    new_partials,
    split_of,
    stretch_of,
)
from baton.engine.triton.prefill import PrefillChunk, plan_prefill, prefill_attention, prefill_tiles
from baton.engine.triton.tile import Tiles

CHECKS: dict[str, Check] = {}
ALLOWED = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# A soft cap multiplies the last place of a tanh near one half, where scores are near zero.
WIDE_CAP, ALLOWED_CAPPED = 30.0, 1e-5
TINY_TILES = Tiles(16, 16, 4, 1)  # so that few tokens make many tiles


@dataclass(frozen=True, slots=True)
class Shape:
    """What a check computes with. `window` in tokens, 0: none."""

    kv_heads: int
    group: int
    dim: int
    block_size: int
    window: int = 0
    soft_cap: float = 0.0


# name: for the interpreter, which takes tens of milliseconds a program; and of a known model
SHAPES = {
    "grouped": (Shape(2, 3, 16, 8), Shape(8, 4, 128, 16)),
    "group of seven": (Shape(1, 7, 16, 8), Shape(2, 7, 64, 16)),
    "odd head": (Shape(1, 2, 24, 16), Shape(32, 1, 96, 32)),
    "window": (Shape(1, 4, 32, 8, window=21), Shape(8, 4, 128, 8, window=250)),
    "soft cap": (Shape(1, 2, 16, 32, soft_cap=3.0), Shape(8, 2, 256, 64, soft_cap=50.0)),
    "window and soft cap": (
        Shape(1, 1, 16, 64, window=40, soft_cap=2.0),
        Shape(8, 2, 256, 64, window=300, soft_cap=50.0),
    ),
}
FULL_SHAPE = SHAPES["window"][1]
# Neither window nor soft cap, blocks of whole boxes of 16 tokens: on Hopper, its own kernel.
PLAIN = {
    "plain, group of seven": (Shape(1, 7, 16, 16), Shape(2, 7, 64, 32)),
    "plain, one head": (Shape(2, 1, 32, 16), Shape(32, 1, 128, 64)),
}


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of `lengths` tokens in a random pool; one layer of it."""

    kv: Tensor  # [block, kv_head, k|v, token, dim], a strided view; NaN where nothing is
    tables: Tensor  # int32 [sequences, longest table], padded with a block full of NaN
    lengths: tuple[int, ...]

    def tokens(self, index: int) -> Tensor:
        """Keys and values of a sequence: float64 [2, kv_head, tokens, dim]."""
        size = self.kv.shape[3]
        blocks = self.tables[index, : -(-self.lengths[index] // size)].long()
        kv = self.kv[blocks].double().permute(2, 1, 0, 3, 4).flatten(2, 3)
        return kv[:, :, : self.lengths[index]].nan_to_num(0.0)  # where no row may look


def random_sequences(
    shape: Shape, lengths: Sequence[int], dtype: torch.dtype, device: torch.device, unused: int = 0
) -> Sequences:
    """Blocks that hold only tokens older than `unused` from the end are lost: NaN."""
    size = shape.block_size
    counts = [-(-length // size) for length in lengths]
    pool = torch.full(
        (sum(counts) + 1, shape.kv_heads, 2, 2, size, shape.dim), float("nan"), dtype=dtype
    )
    order = torch.randperm(sum(counts)).tolist()
    tables = torch.full((len(lengths), max(counts)), sum(counts), dtype=torch.int32)
    for index, length in enumerate(lengths):
        for number in range(counts[index]):
            block = order.pop()
            tables[index, number] = block
            if unused and (number + 1) * size <= length - unused:
                continue
            held = min(size, length - number * size)
            drawn = torch.randn(shape.kv_heads, 2, held, shape.dim)
            pool[block, :, 1, :, :held] = drawn.to(dtype)
    return Sequences(pool.to(device).select(2, 1), tables.to(device), tuple(lengths))


def attention_written_out(
    queries: Tensor, keys: Tensor, values: Tensor, first: int, shape: Shape, scale: float
) -> Tensor:
    """`queries` [tokens, heads, dim], at positions from `first`, over `keys` and `values`
    [kv_head, tokens, dim] up to themselves; float64 [tokens, heads, dim of values]."""
    heads = queries.shape[1]
    keys, values = (x.double().repeat_interleave(heads // x.shape[0], 0) for x in (keys, values))
    scores = queries.double().transpose(0, 1) @ keys.transpose(1, 2) * scale
    if shape.soft_cap:
        scores = shape.soft_cap * (scores / shape.soft_cap).tanh()
    own = torch.arange(first, first + queries.shape[0], device=keys.device)[:, None]
    other = torch.arange(keys.shape[1], device=keys.device)
    seen = other <= own
    if shape.window:
        seen &= other > own - shape.window
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ values).transpose(0, 1)


def prefill_check(shapes: tuple[Shape, Shape], dtype: torch.dtype, mistake: int = 0) -> Check:
    """Chunks of several lengths behind prefixes of several lengths, in one launch. `mistake` is
    added to the window that the truth is computed with."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        shape = shapes[0] if tiny else shapes[1]
        parts = [(0, 1), (37, 9), (0, 12), (64, 2)]  # (start, tokens)
        if not tiny:
            parts = [(0, 700), (1000, 3), (513, 128), (0, 2), (4095, 65)]
        chunks = [
            PrefillChunk(sum(count for _, count in parts[:index]), count, start, index)
            for index, (start, count) in enumerate(parts)
        ]
        lost = shape.window + max(count for _, count in parts) if shape.window else 0
        lengths = [start + count for start, count in parts]
        held = random_sequences(shape, lengths, dtype, device, lost)
        queries = random_queries(chunks[-1].first + chunks[-1].count, shape, dtype, device)
        out = torch.full_like(queries, float("nan"))
        tiles = TINY_TILES if tiny else prefill_tiles(shape.group, shape.dim, dtype)
        plan = plan_prefill(chunks, held.tables, shape.group, tiles)
        scale = 1.3 / shape.dim**0.5
        features = {"window": shape.window, "soft_cap": shape.soft_cap}
        prefill_attention(out, queries, held.kv, plan, scale, **features, tiles=tiles)
        seen = replace(shape, window=shape.window + mistake)
        rows = queries.split([count for _, count in parts])
        truth = [
            attention_written_out(part, *held.tokens(chunk.table), chunk.start, seen, scale)
            for part, chunk in zip(rows, chunks, strict=True)
        ]
        return error(out, torch.cat(truth)), allowed(dtype, shape)

    return run


def decode_check(
    shapes: tuple[Shape, Shape],
    dtype: torch.dtype,
    tiny_splits: Splits,
    splits: Splits,
    mistake: int = 0,
) -> Check:
    """Rows of several lengths, cut into splits."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        shape = shapes[0] if tiny else shapes[1]
        lengths = [1, 16, 17, 70] if tiny else [1, 15, 16, 17, 300, 2049, 5000]
        cut = tiny_splits if tiny else splits
        held = random_sequences(shape, lengths, dtype, device, shape.window)
        queries = random_queries(len(lengths), shape, dtype, device)
        out = torch.full_like(queries, float("nan")).contiguous()
        tiles = TINY_TILES if tiny else decode_tiles(shape.group, shape.dim, dtype)
        capacity = cut.capacity(max(lengths), tiles.tokens)
        partials = new_partials(*queries.shape[:2], capacity, shape.dim, device)
        partials.mixed.fill_(float("nan"))
        partials.weights.fill_(float("nan"))
        counts = torch.tensor(lengths, dtype=torch.int32, device=device)
        scale = 1.3 / shape.dim**0.5
        features = {"window": shape.window, "soft_cap": shape.soft_cap}
        seen = replace(shape, window=shape.window + mistake)
        given = (queries, held.kv, held.tables, counts, cut, partials, scale)
        decode_attention(out, *given, **features, tiles=tiles)
        rows = enumerate(zip(queries.split(1), lengths, strict=True))
        truth = [
            attention_written_out(query, *held.tokens(row), length - 1, seen, scale)
            for row, (query, length) in rows
        ]
        return error(out, torch.cat(truth)), allowed(dtype, shape)

    return run


def cut_check(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Not fused, a row's result is the same bits in whatever chunks the prompt comes, and beside
    others."""
    shape, dtype = (SHAPES["window"][0], torch.float32) if tiny else (FULL_SHAPE, torch.bfloat16)
    tokens, cuts = (30, (7, 8, 23)) if tiny else (1500, (1, 129, 700, 1499))
    tiles = TINY_TILES if tiny else prefill_tiles(shape.group, shape.dim, dtype)
    held = random_sequences(shape, [tokens, 9], dtype, device)
    queries = random_queries(tokens + 5, shape, dtype, device)
    whole = [PrefillChunk(0, tokens, 0, 0)]
    parts = [PrefillChunk(tokens, 5, 4, 1)] + [
        PrefillChunk(first, end - first, first, 0)
        for first, end in zip((0, *cuts), (*cuts, tokens), strict=True)
    ]
    outs = []
    for chunks in (whole, parts):
        out = torch.full_like(queries, float("nan"))
        plan = plan_prefill(chunks, held.tables, shape.group, tiles)
        features = {"window": shape.window, "tiles": tiles, "fused": False}
        prefill_attention(out, queries, held.kv, plan, 0.3, **features)
        outs.append(out[:tokens])
    return float((outs[0] != outs[1]).sum()), 0.0


def batch_check(device: torch.device, tiny: bool) -> tuple[float, float]:
    """With fixed splits, a row's result is the same bits alone and in a batch, and however many
    programs share the splits."""
    shape, dtype = (SHAPES["window"][0], torch.float32) if tiny else (FULL_SHAPE, torch.bfloat16)
    lengths, each = ([70, 5, 41], 16) if tiny else ([5000, 3, 300, 1], 256)
    tiles = TINY_TILES if tiny else decode_tiles(shape.group, shape.dim, dtype)
    held = random_sequences(shape, lengths, dtype, device)
    queries = random_queries(len(lengths), shape, dtype, device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    outs = []
    for rows, programs in ((len(lengths), 4), (1, 1)):
        splits = Splits(programs, each)
        capacity = splits.capacity(max(lengths), tiles.tokens)
        partials = new_partials(rows, queries.shape[1], capacity, shape.dim, device)
        out = torch.full_like(queries[:rows], float("nan")).contiguous()
        given = (queries[:rows], held.kv, held.tables[:rows], counts[:rows])
        decode_attention(out, *given, splits, partials, 0.3, window=shape.window, tiles=tiles)
        outs.append(out[0])
    return float((outs[0] != outs[1]).sum()), 0.0


@triton.jit
def record_splits(
    found, length, programs, SPLIT_TOKENS: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr
):
    _, first, tiles, count = split_of(length, programs, SPLIT_TOKENS, TOKENS, WINDOW)
    for split in range(count):
        low, high = stretch_of(split, first, tiles, count, SPLIT_TOKENS, TOKENS)
        tl.store(found + 2 * split, low)
        tl.store(found + 2 * split + 1, high)


def cover_check(split_tokens: int, window: int) -> Check:
    """Splits cover a row without a gap, and begin at tiles; by count, they differ by at most one
    tile. Counts the rows whose splits do not."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        wrong, tile = 0, 32
        for length in (0, 1, 32, 33, 1000, 4120):
            for programs in (1, 3, 31, 64):
                found = torch.full((200, 2), -1, dtype=torch.int64, device=device)
                record_splits[(1,)](found, length, programs, split_tokens, tile, window)
                parts = [(low, high) for low, high in found.tolist() if low >= 0]
                starts, ends = [low for low, _ in parts], [high for _, high in parts]
                first = max(length - window, 0) // tile * tile if window else 0
                tiles = -(-(length - first) // tile)
                good = starts == [first, *ends[:-1]] and ends[-1] >= length
                good &= all(low % tile == 0 for low in starts)
                sizes = {high - low for low, high in parts}
                if split_tokens:
                    good &= sizes == {split_tokens}
                else:
                    good &= len(parts) == max(min(programs, tiles), 1)
                    good &= max(sizes) - min(sizes) <= tile
                wrong += not good
        return float(wrong), 0.0

    return run


def allowed(dtype: torch.dtype, shape: Shape) -> float:
    """An error in any row of `shape`."""
    return max(ALLOWED[dtype], ALLOWED_CAPPED if shape.soft_cap >= WIDE_CAP else 0.0)


def random_queries(rows: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, heads, dim] inside of a wider row, as queries lie beside keys and values."""
    heads = shape.kv_heads * shape.group
    return torch.randn(rows, heads + 1, shape.dim).to(device, dtype)[:, :heads]


_WHOLE, _COUNTED, _FIXED = (
    ("one program", Splits(1), Splits(1)),
    ("splits by count", Splits(3), Splits(7)),
    ("fixed splits", Splits(2, 16), Splits(5, 512)),
)
for _name, _shapes in SHAPES.items():
    for _dtype in ALLOWED if _name == "grouped" else (torch.float32,):
        _kind = f"{_name}, {str(_dtype).removeprefix('torch.')}"
        CHECKS[f"prefill attention, {_kind}"] = prefill_check(_shapes, _dtype)
        for _cut, *_splits in (_WHOLE, _FIXED) if _shapes[0].window else (_COUNTED,):
            CHECKS[f"decode attention, {_kind}, {_cut}"] = decode_check(_shapes, _dtype, *_splits)
for _name, _shapes in PLAIN.items():
    for _dtype in (torch.float16, torch.bfloat16):
        _kind = f"{_name}, {str(_dtype).removeprefix('torch.')}"
        CHECKS[f"prefill attention, {_kind}"] = prefill_check(_shapes, _dtype)
CHECKS["prefill attention, plain, a window in the truth is noticed"] = noticed(
    prefill_check(PLAIN["plain, one head"], torch.bfloat16, mistake=40)
)
_windowed = (SHAPES["window"], torch.float32)
CHECKS["prefill attention, a window one too long is noticed"] = noticed(
    prefill_check(*_windowed, mistake=-1)
)
CHECKS["decode attention, a window one too long is noticed"] = noticed(
    decode_check(*_windowed, Splits(2), Splits(3), mistake=-1)
)
CHECKS["prefill attention, bits do not depend on the cut"] = cut_check
CHECKS["decode attention, bits do not depend on the batch"] = batch_check
CHECKS["decode attention, splits by count cover a row"] = cover_check(0, 0)
CHECKS["decode attention, splits by count cover a window"] = cover_check(0, 700)
CHECKS["decode attention, fixed splits cover a row"] = cover_check(128, 0)
