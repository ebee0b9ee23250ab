"""Handoffs between workers whose ranks have pools of their own: READs by real NIXL, run by run."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.kv_transfer import handshake
from baton.kv_transfer.layout import heads_of
from baton.kv_transfer.local_pool import HostPool, LocalPool, RankedPool, RankPool
from baton.kv_transfer.nixl_mover import NixlMover
from baton.proto import handoff_pb2
from baton.runtime.errors import Incompatible, ReadFailed

pytest.importorskip("nixl")

BLOCKS, SLAB_BYTES = 12, 256
GRANTER, READER = b"granter's boot 1", b"a reader's boot1"
WAIT_S = 30.0
# KV heads, ranks of the granter, of the reader, descriptors of a block. 0: one pool for all heads.
SPLITS = [
    (4, 0, 2, 2),
    (4, 2, 0, 2),
    (4, 2, 2, 2),
    (4, 2, 4, 4),
    (4, 4, 2, 4),
    (4, 0, 4, 4),
    (4, 4, 0, 4),
    (2, 4, 4, 4),  # fewer heads than ranks: each copy is read from a rank that holds the head
    (2, 4, 2, 2),
    (2, 1, 4, 4),
    (1, 2, 2, 2),  # latent attention: one slab, the same on every rank
    (1, 2, 0, 1),
    (1, 0, 4, 4),
]


def pool_of(whole: NDArray[np.uint8], ranks: int) -> tuple[LocalPool, list[NDArray[np.uint8]]]:
    """A pool of `whole` [blocks, heads, bytes] over `ranks`, 0: in one memory; and the memories."""
    heads = whole.shape[1]
    split = [heads_of(heads, max(1, ranks), rank) for rank in range(max(1, ranks))]
    arrays = [whole[:, each.start : each.stop].reshape(BLOCKS, -1).copy() for each in split]
    pools = [HostPool(array, len(each)) for array, each in zip(arrays, split, strict=True)]
    return (RankedPool(pools, heads) if ranks else pools[0]), arrays


@pytest.mark.parametrize(("heads", "granter", "reader", "descriptors"), SPLITS)
async def test_each_rank_reads_its_heads_and_verifies_them(
    heads: int, granter: int, reader: int, descriptors: int
) -> None:
    rng = np.random.default_rng(heads + granter)
    whole = rng.integers(0, 256, (BLOCKS, heads, SLAB_BYTES), dtype=np.uint8)
    theirs, _ = pool_of(whole, granter)
    ours, arrays = pool_of(np.zeros_like(whole), reader)
    remote, local, seeds = [3, 4, 9], [0, 7, 2], [11, 12, 13]
    async with AsyncExitStack() as stack:
        far = NixlMover(theirs, GRANTER)
        stack.push_async_callback(far.close)
        near = NixlMover(ours, READER)
        stack.push_async_callback(near.close)
        far.hold_progress()
        await near.connect(far.describe())
        read = near.read(GRANTER, remote, local, seeds)
        async with asyncio.timeout(WAIT_S):
            await read.landed
        assert read.checksums is not None
        found, shape = await read.checksums, near.shape(GRANTER)
        offered = await far.checksums(remote, seeds)
    assert len(shape.cuts or [0]) == descriptors
    assert (found == (offered[:, list(shape.slabs)] if shape.slabs else offered)).all()
    for rank, array in enumerate(arrays):
        own = heads_of(heads, max(1, reader), rank)
        wanted = whole[remote][:, own.start : own.stop].reshape(len(remote), -1)
        assert (array[local] == wanted).all()
        assert not array[[block for block in range(BLOCKS) if block not in local]].any()


async def test_a_wrong_byte_of_one_rank_is_in_its_slabs_checksum_alone() -> None:
    whole = np.zeros((BLOCKS, 4, SLAB_BYTES), dtype=np.uint8)
    pool, arrays = pool_of(whole, 2)
    before = pool.checksums([5], [1])
    arrays[1][5, 0] ^= 1  # the first slab of the second rank
    assert (pool.checksums([5], [1]) != before).tolist() == [[False, False, True, False]]


def test_pools_that_differ_are_refused() -> None:
    pools = [HostPool(np.zeros((BLOCKS, size), dtype=np.uint8), 1) for size in (256, 512)]
    with pytest.raises(ValueError, match="the pools of 2 ranks differ"):
        RankedPool(pools, 2)


def message(
    ranks: int, block_bytes: int = 1024, kv_heads: int = 4, **changes: object
) -> handoff_pb2.HandshakeMessage:
    common = handshake.compatibility("model", "bfloat16", 16, 2, kv_heads, 64)
    each = tuple(RankPool(4096 + rank, block_bytes // ranks, rank) for rank in range(ranks))
    pool = handshake.PeerPool(
        GRANTER, "nixl", b"", 4096, block_bytes, BLOCKS, rank_pools=each, kv_heads=kv_heads
    )
    built = handshake.build("w", pool, common)
    for name, value in changes.items():
        setattr(built.compatibility, name, value)
    return built


def test_pools_of_ranks_travel_in_the_handshake() -> None:
    theirs = message(2)
    handshake.check(message(0), theirs)
    found = handshake.bridged_pool(message(0), theirs)
    assert found.rank_pools == (RankPool(4096, 512, 0), RankPool(4097, 512, 1))
    assert found.shape(1024).granter_slabs == 4


def test_slabs_of_another_size_are_named() -> None:
    with pytest.raises(Incompatible, match="slab_bytes 256 here, 512 there"):
        handshake.check(message(2), message(2, 2048))


def test_no_other_form_of_kv_is_bridged_beside_ranks() -> None:
    ours, theirs = message(2, bridges_sizes=True), message(0, bridges_sizes=True, block_size=32)
    with pytest.raises(Incompatible, match="block_size 16 here, 32 there"):
        handshake.check(ours, theirs)


@pytest.mark.parametrize("wrong", [dict(block_bytes=511), dict(address=(1 << 64) - 1)])
def test_pools_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    theirs = message(2)
    for name, value in wrong.items():
        setattr(theirs.pool.rank_pools[1], name, value)
    with pytest.raises(Incompatible, match="2 ranks whose pools"):
        handshake.peer_pool(theirs)


def test_ranks_that_do_not_divide_the_heads_are_not_read() -> None:
    pool = handshake.peer_pool(message(2))
    with pytest.raises(ReadFailed, match="do not fit"):
        replace(pool, kv_heads=3).shape(1024)
    with pytest.raises(ReadFailed, match="do not fit the own blocks of 1000 bytes on 4 ranks"):
        pool.shape(1000, 4)
