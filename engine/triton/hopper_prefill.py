"""Attention of plain 16-bit chunks on Hopper, in warps with roles.

One warp copies tiles of the paged pool to shared memory with the copy engine (TMA), which needs
neither registers nor a contiguous copy of the sequence. Two warpgroups compute 64 rows of queries
each, as in FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608): the products of one overlap the
softmax of the other, and the product with values overlaps the next product with keys. Programs
persist: while results are stored, the tiles of the next piece of work are already copied.

Tiles of keys come from the newest to the oldest, so a row's last bits differ from
`prefill_kernel`'s; a row depends on where its chunk begins. Expected limit: the tensor cores' rate.
Written in Gluon, which Triton's interpreter does not run. The module owns nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from baton.engine.triton.tile import INTERPRETED, LOG2_E

TILE_ROWS = 128  # rows of queries of a program, half of them of each warpgroup
_TOKENS = 128  # of a tile of keys
_STAGES = 2  # tiles of keys, and as many of values, in shared memory
_REGISTERS = (232, 40)  # of a thread that computes; of one that copies
_DIMS = (64, 128)

BOX = gl.constexpr(16)  # tokens of one copy; a block of the pool is a multiple of it
COLUMNS = gl.constexpr(64)  # of one copy: 128 bytes, the width of the swizzle
NO_SCORE = gl.constexpr(-1e30)
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7; 3.6


def is_supported(queries: Tensor, kv: Tensor, window: int, soft_cap: float, rows: int) -> bool:
    """Return whether the kernel computes these chunks. `queries` [rows, heads, dim]; `kv` as for
    `prefill_attention`; `rows`: of a tile of the plan."""
    return (
        not INTERPRETED
        and not window
        and not soft_cap
        and rows == TILE_ROWS
        and queries.dtype in (torch.bfloat16, torch.float16)
        and kv.dtype == queries.dtype
        and queries.shape[2] in _DIMS
        and kv.shape[3] % BOX.value == 0
        and kv.stride(3) == queries.shape[2]
        and driver.active.get_current_target().arch == 90
    )


# fmt: off
@gluon.jit
def _work_of(turn, programs):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the piece of work of this program's `turn`. Work is sorted by length, so every other
    turn runs backwards: all programs then get about as much."""
    own, backwards = gl.program_id(0), turn % 2
    return turn * programs + own * (1 - backwards) + (programs - 1 - own) * backwards


@gluon.jit
def _pool_rows(  # type: ignore[no-untyped-def] # Triton infers types
    table, first, end, head_row, block_rows, missing,
    TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):
    """Return the pool's row of the keys of every `BOX`th token from `first` on; from `end` on a row
    that the pool does not have, of which the copy engine makes zeros."""
    rows = ()
    for box in gl.static_range(TOKENS // BOX):
        token = first + box * BOX
        held = token < end
        block = gl.load(table + gl.where(held, token // BLOCK_SIZE, 0))
        row = block * block_rows + head_row + token % BLOCK_SIZE
        rows = rows + (gl.where(held, row, missing),)  # type: ignore[assignment] # the loop is unrolled
    return rows


@gluon.jit
def _copy(  # type: ignore[no-untyped-def] # Triton infers types
    pool, rows, offset, buffer, full, empty, slot, phase, TOKENS: gl.constexpr, DIM: gl.constexpr
):
    """Copy a tile to `slot` of `buffer` as soon as it is empty."""
    boxes: gl.constexpr = TOKENS // BOX
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), TOKENS * DIM * 2)
    for part in gl.static_range(DIM // COLUMNS):
        for box in gl.static_range(boxes):
            to = buffer.index((slot * (DIM // COLUMNS) + part) * boxes + box)
            at = [rows[box] + offset, part * COLUMNS]
            tma.async_copy_global_to_shared(pool, at, full.index(slot), to)


@gluon.jit
def _produce(  # type: ignore[no-untyped-def] # Triton infers types
    buffer, full, empty, pool, tables, tiles, stride_table, block_rows, head_rows, value_rows,
    missing, work, programs,
    KV_HEADS: gl.constexpr, DIM: gl.constexpr, TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    done = 0
    for turn in range(gl.cdiv(work, programs)):
        item = _work_of(turn, programs)
        if item < work:
            tile = tiles + item // KV_HEADS * 4
            table = tables + gl.load(tile).to(gl.int64) * stride_table
            end = gl.load(tile + 2) + gl.load(tile + 3)
            count = gl.cdiv(end, TOKENS)
            for index in range(count):
                rows = _pool_rows(
                    table, (count - 1 - index) * TOKENS, end, item % KV_HEADS * head_rows,
                    block_rows, missing, TOKENS, BLOCK_SIZE)
                slot, phase = done % STAGES, done // STAGES & 1
                _copy(pool, rows, 0, buffer, full, empty, slot, phase, TOKENS, DIM)
                slot += STAGES
                _copy(pool, rows, value_rows, buffer, full, empty, slot, phase, TOKENS, DIM)
                done += 1


@gluon.jit
def _clear_after(buffer, slot, end, TOKENS: gl.constexpr, DIM: gl.constexpr):  # type: ignore[no-untyped-def] # Gluon infers types
    """Set values from `end` on to zero in the box of the last token. The pool may hold anything
    there, and a weight of zero times NaN is NaN. Both warpgroups do so, to the same bytes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    boxes: gl.constexpr = TOKENS // BOX
    left = end % BOX
    if left != 0:
        lanes = gl.arange(0, BOX, layout=gl.SliceLayout(1, layout))
        for part in gl.static_range(DIM // COLUMNS):
            at = (slot * (DIM // COLUMNS) + part) * boxes + end % TOKENS // BOX
            box = buffer.index(at)
            values = box.load(layout)
            box.store(gl.where((lanes < left)[:, None], values, 0.0).to(values.dtype))
        fence_async_shared()


@gluon.jit
def _weigh(scores, best, total, scale):  # type: ignore[no-untyped-def] # Triton infers types
    """Compute one step of the online softmax, as `tile.weigh` of `scores` [rows, tokens]; `scale`
    makes exponents of two of them. A row may not have seen any token yet."""
    highest = gl.maximum(best, gl.max(scores, axis=1))
    exponent = gl.where(highest == NO_SCORE, 0.0, highest * scale)
    weights = gl.exp2(scores * scale - exponent[:, None])
    shrink = gl.exp2(best * scale - exponent)
    return weights, highest, total * shrink + gl.sum(weights, axis=1), shrink


@gluon.jit
def _masked(scores, first, position):  # type: ignore[no-untyped-def] # Triton infers types
    """Hide the tokens after each row's own. `first`: the tile's first token."""
    layout: gl.constexpr = scores.type.layout
    tokens = first + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))
    return gl.where(tokens[None, :] <= position[:, None], scores, NO_SCORE)


@gluon.jit
def _free(empty, slot):  # type: ignore[no-untyped-def] # Triton infers types
    """Let a tile be overwritten: all warps of this warpgroup have read it."""
    _barrier()
    mbarrier.arrive(empty.index(slot))


@gluon.jit
def _attend_tile(  # type: ignore[no-untyped-def] # Triton infers types
    mixed, weights, best, total,
    nothing,  # [rows, TOKENS] of zeros
    query, buffer, full, empty, position,
    done,  # tiles that came before, of all work
    first,  # token of the tile
    scale,
    MASKED: gl.constexpr, STAGES: gl.constexpr,
):
    """Multiply the tile before's `weights` with its values while this tile is weighed."""
    slot, phase = done % STAGES, done // STAGES & 1
    before, phase_before = STAGES + (done - 1) % STAGES, (done - 1) // STAGES & 1
    mbarrier.wait(full.index(slot), phase)
    keys = buffer.index(slot).permute([1, 0])
    scores = warpgroup_mma(query, keys, nothing, use_acc=False, is_async=True)
    mbarrier.wait(full.index(before), phase_before)
    mixed = warpgroup_mma(weights, buffer.index(before), mixed, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    _free(empty, slot)
    if MASKED:
        scores = _masked(scores, first, position)
    found, best, total, shrink = _weigh(scores, best, total, scale)
    mixed = warpgroup_mma_wait(0, deps=[mixed])
    _free(empty, before)
    mixed = mixed * gl.convert_layout(shrink, gl.SliceLayout(1, mixed.type.layout))[:, None]
    weights = gl.convert_layout(found.to(weights.dtype), weights.type.layout)
    return mixed, weights, best, total


@gluon.jit
def _load_queries(  # type: ignore[no-untyped-def] # Triton infers types
    query, queries, stride_row, stride_head, first_row, count, head, half: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Load this warpgroup's rows, of which a tile has `count` tokens, to shared memory."""
    DIM: gl.constexpr = query.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    lanes = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    row = (first_row + gl.minimum(lanes // GROUP, count - 1)).to(gl.int64)
    at = row * stride_row + (head * GROUP + lanes % GROUP) * stride_head
    live = (lanes < count * GROUP)[:, None]
    query.store(gl.load(queries + at[:, None] + dims[None, :], mask=live, other=0.0))
    fence_async_shared()


@gluon.jit
def _store_rows(  # type: ignore[no-untyped-def] # Triton infers types
    out, mixed, total, stride_row, stride_head, first_row, count, head, half: gl.constexpr,
    GROUP: gl.constexpr,
):
    layout: gl.constexpr = mixed.type.layout
    lanes = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, mixed.shape[1], layout=gl.SliceLayout(0, layout))
    row = (first_row + gl.minimum(lanes // GROUP, count - 1)).to(gl.int64)
    at = row * stride_row + (head * GROUP + lanes % GROUP) * stride_head
    mixed = mixed * gl.convert_layout(1.0 / total, gl.SliceLayout(1, layout))[:, None]
    live = (lanes < count * GROUP)[:, None]
    gl.store(out + at[:, None] + dims[None, :], mixed.to(out.dtype.element_ty), mask=live)


@gluon.jit
def _consume(  # type: ignore[no-untyped-def] # Triton infers types
    half: gl.constexpr, query, boxes, full, empty, out, queries, tiles,
    stride_out_row, stride_out_head, stride_query_row, stride_query_head, scale, work, programs,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    of_mixed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_mixed, 2)
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    buffer = boxes._reinterpret(boxes.dtype, [2 * STAGES, TOKENS, DIM], query.layout)
    nothing = gl.full([64, TOKENS], 0.0, gl.float32, layout=of_scores)
    done = 0
    for turn in range(gl.cdiv(work, programs)):
        item = _work_of(turn, programs)
        if item < work:
            head, tile = item % KV_HEADS, tiles + item // KV_HEADS * 4
            first_row, count, start = gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)
            _load_queries(
                query, queries, stride_query_row, stride_query_head, first_row, count, head, half,
                GROUP)
            lanes = half * 64 + gl.arange(0, 64, layout=of_rows)
            position = start + gl.minimum(lanes // GROUP, count - 1)
            end = start + count
            all_tiles = gl.cdiv(end, TOKENS)
            # The oldest tiles, which all rows see whole; the last tile is masked in any case.
            clear = gl.minimum((start + 1) // TOKENS, all_tiles - 1)
            best = gl.full([64], NO_SCORE, gl.float32, layout=of_rows)
            total = gl.full([64], 0.0, gl.float32, layout=of_rows)
            mixed = gl.full([64, DIM], 0.0, gl.float32, layout=of_mixed)

            slot, phase = done % STAGES, done // STAGES & 1
            mbarrier.wait(full.index(slot), phase)
            keys = buffer.index(slot).permute([1, 0])
            scores = warpgroup_mma(query, keys, nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            _free(empty, slot)
            scores = _masked(scores, (all_tiles - 1) * TOKENS, position)
            found, best, total, shrink = _weigh(scores, best, total, scale)
            weights = gl.convert_layout(found.to(query.dtype), of_weights)
            mbarrier.wait(full.index(STAGES + slot), phase)
            _clear_after(boxes, STAGES + slot, end, TOKENS, DIM)
            for index in range(1, all_tiles - clear):
                mixed, weights, best, total = _attend_tile(
                    mixed, weights, best, total, nothing, query, buffer, full, empty, position,
                    done + index, (all_tiles - 1 - index) * TOKENS, scale, True, STAGES)
            for index in range(all_tiles - clear, all_tiles):
                mixed, weights, best, total = _attend_tile(
                    mixed, weights, best, total, nothing, query, buffer, full, empty, position,
                    done + index, 0, scale, False, STAGES)
            done += all_tiles
            slot, phase = STAGES + (done - 1) % STAGES, (done - 1) // STAGES & 1
            mbarrier.wait(full.index(slot), phase)
            mixed = warpgroup_mma(weights, buffer.index(slot), mixed, is_async=True)
            mixed = warpgroup_mma_wait(0, deps=[mixed])
            _free(empty, slot)
            _store_rows(
                out, mixed, total, stride_out_row, stride_out_head, first_row, count, head, half,
                GROUP)


# Specialising on a batch's values would compile kernels while clients wait.
@gluon.jit(do_not_specialize=["stride_table", "missing", "work", "programs"])
def hopper_prefill_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    out, queries,  # [rows, heads, DIM]
    pool,  # descriptor of the pool from one layer's first row on: [rows, DIM], in boxes
    tables, tiles,  # of the plan
    stride_out_row, stride_out_head, stride_query_row, stride_query_head, stride_table,
    block_rows, head_rows, value_rows,  # rows of the pool from one block, head and k|v to the next
    missing,  # a row that the pool does not have
    work,  # tiles x KV_HEADS
    programs,
    scale,  # from scores to exponents of two
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, TOKENS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    query = gl.allocate_shared_memory(pool.dtype, [2, 64, DIM], swizzled)
    count: gl.constexpr = 2 * STAGES * (TOKENS // BOX) * (DIM // COLUMNS)
    boxes = gl.allocate_shared_memory(pool.dtype, [count, BOX, COLUMNS], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], barriers)  # keys, then values
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], barriers)
    for slot in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)  # both warpgroups
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (
            0, query.index(0), boxes, full, empty, out, queries, tiles,
            stride_out_row, stride_out_head, stride_query_row, stride_query_head, scale, work,
            programs, KV_HEADS, GROUP, DIM, TOKENS, STAGES)),
        (_consume, (
            1, query.index(1), boxes, full, empty, out, queries, tiles,
            stride_out_row, stride_out_head, stride_query_row, stride_query_head, scale, work,
            programs, KV_HEADS, GROUP, DIM, TOKENS, STAGES)),
        (_produce, (
            boxes, full, empty, pool, tables, tiles, stride_table, block_rows, head_rows,
            value_rows, missing, work, programs, KV_HEADS, DIM, TOKENS, BLOCK_SIZE, STAGES)),
    ], [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS])
# fmt: on


def hopper_prefill_attention(
    out: Tensor, queries: Tensor, kv: Tensor, tables: Tensor, tiles: Tensor, scale: float
) -> None:
    """Compute `prefill_attention` of chunks that `is_supported`; `tables` and `tiles` as in
    `PrefillPlan`. One launch; never waits for the device."""
    _, heads, dim = queries.shape
    kv_heads = kv.shape[1]
    held = kv.untyped_storage().nbytes() // kv.element_size() - kv.storage_offset()
    rows = torch.as_strided(kv, (held // dim, dim), (dim, 1))  # from this layer's first on
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    pool = TensorDescriptor(rows, [held // dim, dim], [dim, 1], [BOX.value, COLUMNS.value], layout)
    work = tiles.shape[0] * kv_heads
    programs = min(work, multiprocessors(queries.device))
    hopper_prefill_kernel[(programs,)](
        out,
        queries,
        pool,
        tables,
        tiles,
        *out.stride()[:2],
        *queries.stride()[:2],
        tables.stride(0),
        *(stride // dim for stride in kv.stride()[:3]),
        held // dim,
        work,
        programs,
        scale * LOG2_E.value,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        TOKENS=_TOKENS,
        BLOCK_SIZE=kv.shape[3],
        STAGES=_STAGES,
        COMPUTE_REGISTERS=_REGISTERS[0],
        COPY_REGISTERS=_REGISTERS[1],
        num_warps=4,
    )


def multiprocessors(device: torch.device) -> int:
    """Return how many a device has; 1 if it is not a GPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
