"""The sum of a vector over the ranks of a worker, computed through shared memory.

    flags    int64 [ranks, 8]                   a cache line for each rank: its last round
    buffers  [2, ranks, numbers]                used by alternate rounds

In a round, a rank copies its vector into its buffer, raises its flag, waits for all flags, and adds
the buffers in the order of the ranks, so that every rank computes the same bits. A rank that raises
its flag for round n + 1 has read all buffers of round n, so round n + 2 may overwrite them: two
buffers need no second flag.

A waiting rank spins briefly, then yields its core, since there may be more ranks than cores. Flags
are read with acquire and written with release ordering. The module needs numba and keeps no state.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped] # numba's own compiler
from numba import types
from numba.extending import intrinsic

from baton.engine.cpu.compiled import compiled, inner
from baton.engine.cpu.dot_bf16 import call

_SPINS = 4_000  # about 50 us, more than ranks on free cores differ by
_YIELDS = 20_000  # then the caller reads its clock
_LINE = 8  # int64 numbers of a cache line
TILE = 2_048  # numbers that fit into the first-level cache

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


def _load_acquire(_typing: Any, address: Any) -> Any:
    """Read the int64 at `address` with acquire ordering."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, ordering="acquire", align=8)

    return types.int64(address), emit


def _store_release(_typing: Any, address: Any, value: Any) -> Any:
    """Write the int64 `value` to `address` with release ordering."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(address, value), emit


def _relax(_typing: Any) -> Any:
    """Yield to the core's other hardware thread, inside a spin loop."""

    def emit(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            call(builder, "llvm.x86.sse2.pause", kind, [])
        return context.get_dummy_value()

    return types.void(), emit


load_acquire: Any = intrinsic(_load_acquire)
store_release: Any = intrinsic(_store_release)
relax: Any = intrinsic(_relax)


@inner
def missing_rank(flags, ranks, sequence):  # type: ignore[no-untyped-def] # numba infers types
    """Wait for all flags. Returns 0, or 1 + the first rank whose flag is missing after the spins
    and yields of one call."""
    for rank in range(ranks):
        address = flags.ctypes.data + rank * _LINE * 8
        tries = 0
        while load_acquire(address) < sequence:
            tries += 1
            if tries > _SPINS + _YIELDS:
                return rank + 1
            if tries > _SPINS:
                _sched_yield()
            else:
                relax()
    return 0


@inner
def post_and_wait(vector, flags, round_buffers, rank, sequence, posted):  # type: ignore[no-untyped-def] # numba infers types
    """Publish the rank's own vector unless an earlier call did, and wait for the other ranks.
    Returns like `missing_rank`."""
    if not posted:
        round_buffers[rank, : vector.shape[0]] = vector
        store_release(flags.ctypes.data + rank * _LINE * 8, sequence)
    return missing_rank(flags, round_buffers.shape[0], sequence)


def _exchange_float32(vector, flags, buffers, rank, sequence, posted):  # type: ignore[no-untyped-def] # numba infers types
    """Run one round of float32 numbers, whose sum replaces `vector`. `posted`: an earlier call
    began this round and returned a missing rank. Returns like `missing_rank`."""
    ranks, count = buffers.shape[1], vector.shape[0]
    round_buffers = buffers[sequence % 2]
    missing = post_and_wait(vector, flags, round_buffers, rank, sequence, posted)
    if missing:
        return missing
    if ranks == 2:  # one pass over memory
        first, second = round_buffers[0], round_buffers[1]
        for index in range(count):
            vector[index] = first[index] + second[index]
        return 0
    for start in range(0, count, TILE):
        end = min(start + TILE, count)
        for index in range(start, end):
            vector[index] = round_buffers[0, index]
        for other in range(1, ranks):
            for index in range(start, end):
                vector[index] += round_buffers[other, index]
    return 0


def _exchange_bfloat16(vector, flags, buffers, rank, sequence, posted, scratch):  # type: ignore[no-untyped-def] # numba infers types
    """Same as `_exchange_float32` for bfloat16 numbers, given as uint16. They are added as float32
    and rounded once, to nearest even. `scratch`: float32 [2, TILE]."""
    ranks, count = buffers.shape[1], vector.shape[0]
    round_buffers = buffers[sequence % 2]
    missing = post_and_wait(vector, flags, round_buffers, rank, sequence, posted)
    if missing:
        return missing
    total, term = scratch[0], scratch[1]
    total_bits, term_bits = total.view(np.uint32), term.view(np.uint32)
    for start in range(0, count, TILE):
        length = min(TILE, count - start)
        for index in range(length):
            total_bits[index] = np.uint32(round_buffers[0, start + index]) << np.uint32(16)
        for other in range(1, ranks):
            for index in range(length):
                term_bits[index] = np.uint32(round_buffers[other, start + index]) << np.uint32(16)
            for index in range(length):
                total[index] += term[index]
        for index in range(length):
            bits = total_bits[index]
            half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            rounded = (bits if nan else bits + half) >> np.uint32(16)
            vector[start + index] = np.uint16(rounded | np.uint32(0x40) if nan else rounded)
    return 0


exchange_float32 = compiled(_exchange_float32, strict=True)
exchange_bfloat16 = compiled(_exchange_bfloat16, strict=True)
