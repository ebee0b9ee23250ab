"""The checksum of KV blocks in a GPU's memory: algorithm `nh64-1`, bit for bit.

The checksum of a slab of 64-bit words w[0..n) under a seed s is, modulo 2**64,

    key(i)  = s + i * 0x9E3779B97F4A7C15
    product = sum of lo32(w[i] ^ key(i)) * hi32(w[i] ^ key(i))
    sum     = mix(product ^ mix(sum of w[i] + s))        mix: SplitMix64's finaliser

Additions commute, so a slab is summed in parts. kv_transfer owns the definition; only checksums
leave the device. The module keeps no state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ALGORITHM = "nh64-1"
_BLOCK = 1024  # words of one load
_PART = 16384  # words that one program sums


def block_checksums(pool: Tensor, blocks: Tensor, seeds: Tensor, slabs: int) -> Tensor:
    """Return the bits of the unsigned checksums, int64 [len(blocks), slabs].

    `pool` is uint8 [pool blocks, block bytes], contiguous and aligned to 8 bytes; `blocks` int64
    and `seeds` int64 (the bits of the unsigned seeds) are on its device. The caller guarantees
    that every block is in the pool. Raises ValueError if a slab is not a whole number of words.
    """
    width = pool.shape[1]
    if slabs < 1 or width % (slabs * 8):
        raise ValueError(f"a block of {width} bytes cannot have {slabs} slabs of 8-byte words")
    count, slab_words = blocks.shape[0], width // 8 // slabs
    parts = triton.cdiv(slab_words, _PART)
    sums = torch.empty((count, slabs), dtype=torch.int64, device=pool.device)
    if count:
        partial = torch.empty((2, count, slabs, parts), dtype=torch.int64, device=pool.device)
        # Blocks are on the first axis, the only one that allows more than 65,535 programs.
        _sum_parts[(count, slabs, parts)](
            pool.view(torch.int64), blocks, seeds, partial, slab_words, PART=_PART, BLOCK=_BLOCK
        )
        block = triton.next_power_of_2(parts)
        _finish[(count * slabs,)](partial, seeds, sums, slabs, parts, count * slabs, BLOCK=block)
    return sums


@triton.jit
def _sum_parts(  # type: ignore[no-untyped-def] # Triton infers types
    word_ptr,
    block_ptr,
    seed_ptr,
    partial_ptr,
    slab_words,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number, slab, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count, slabs, parts = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    seed = tl.load(seed_ptr + number).to(tl.uint64, bitcast=True)
    start = word_ptr + (tl.load(block_ptr + number) * slabs + slab) * slab_words
    products = tl.zeros((BLOCK,), dtype=tl.uint64)
    totals = tl.zeros((BLOCK,), dtype=tl.uint64)
    for first in range(part * PART, min((part + 1) * PART, slab_words), BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < slab_words
        word = tl.load(start + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
        keyed = word ^ (seed + index.to(tl.uint64) * 0x9E3779B97F4A7C15)
        product = (keyed & 0xFFFFFFFF) * (keyed >> 32)
        products += tl.where(inside, product, 0)
        totals += word
    target = partial_ptr + (number.to(tl.int64) * slabs + slab) * parts + part
    tl.store(target, tl.sum(products, axis=0).to(tl.int64, bitcast=True))
    behind = count.to(tl.int64) * slabs * parts
    tl.store(target + behind, tl.sum(totals, axis=0).to(tl.int64, bitcast=True))


@triton.jit
def _mix(value):  # type: ignore[no-untyped-def] # Triton infers types
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit(do_not_specialize=["count"])
def _finish(  # type: ignore[no-untyped-def] # Triton infers types
    partial_ptr, seed_ptr, sum_ptr, slabs, parts, count, BLOCK: tl.constexpr
):
    slab = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    source = partial_ptr + slab.to(tl.int64) * parts + part
    products = tl.load(source, mask=part < parts, other=0)
    totals = tl.load(source + count.to(tl.int64) * parts, mask=part < parts, other=0)
    product = tl.sum(products, axis=0).to(tl.uint64, bitcast=True)
    total = tl.sum(totals, axis=0).to(tl.uint64, bitcast=True)
    seed = tl.load(seed_ptr + slab // slabs).to(tl.uint64, bitcast=True)
    value = _mix(product ^ _mix(total + seed))
    tl.store(sum_ptr + slab, value.to(tl.int64, bitcast=True))
