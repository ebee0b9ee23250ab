"""READs in segments: how they are cut, and that several threads count their ends rightly."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.deploy.serve.device_defaults import on_gpu
from baton.kv_transfer.local_pool import DevicePool, HostPool
from baton.kv_transfer.read_segments import (
    DEVICE_BYTES,
    SEGMENT_BYTES,
    SegmentedRead,
    blocks_enough,
    cut,
    units_each,
)
from baton.runtime.config import Config
from baton.runtime.errors import ReadFailed

PEER = b"P" * 16


def _no_sums(blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
    raise AssertionError("no sums were asked for")


def reported() -> tuple[list[ReadFailed | None], SegmentedRead]:
    ends: list[ReadFailed | None] = []
    return ends, SegmentedRead(PEER, 3, None, ends.append)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_the_pieces_of_a_read_are_its_blocks_in_order(blocks: int) -> None:
    remote, local = list(range(100, 100 + blocks)), list(range(blocks))[::-1]
    made = cut(PEER, remote, local, 2, None, lambda failure: None)
    assert [int(block) for segment in made for block in segment.remote] == remote
    assert [int(block) for segment in made for block in segment.local] == local
    assert [(p.first, p.end) for p in made] == [
        (first, min(first + 2, blocks)) for first in range(0, blocks, 2)
    ]
    assert len({id(segment.read) for segment in made}) == 1


def test_a_piece_holds_a_block_and_a_device_takes_a_whole_read() -> None:
    wide = HostPool(np.zeros((2, 64), dtype=np.uint8), 1)
    assert units_each(wide, 64) == SEGMENT_BYTES // 64
    wide.block_bytes = 3 * SEGMENT_BYTES
    assert units_each(wide, wide.block_bytes) == 1
    device = DevicePool(1 << 40, 9, 64, 1, 0, _no_sums, lambda: None)
    assert units_each(device, device.block_bytes) == 9
    assert (
        blocks_enough(device) == DEVICE_BYTES // 64 >= on_gpu(Config(), ()).handoff.read_bytes // 64
    )


def test_a_read_ends_with_its_last_piece() -> None:
    ends, read = reported()
    read.segments_ended(1, None)
    read.segments_ended(1, None)
    assert not ends
    read.segments_ended(1, None)
    assert ends == [None]


def test_the_first_failure_is_reported() -> None:
    ends, read = reported()
    first, second = ReadFailed("first"), ReadFailed("second")
    for failure in (None, first, second):
        read.segments_ended(1, failure)
    assert ends == [first] and read.failure is first


def test_threads_that_end_pieces_at_once_tell_one_end() -> None:
    count, threads = 4000, 8
    ends: list[ReadFailed | None] = []
    read = SegmentedRead(PEER, count, None, ends.append)
    together = threading.Barrier(threads)

    def end_some() -> None:
        together.wait(30)
        for _ in range(count // threads):
            read.segments_ended(1, None)

    with ThreadPoolExecutor(threads) as pool:
        for running in [pool.submit(end_some) for _ in range(threads)]:
            running.result(30)
    assert ends == [None]
