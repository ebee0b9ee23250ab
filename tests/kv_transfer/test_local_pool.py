"""What a mover is given of a pool, on a host and on a device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.kv_transfer.checksum import reference
from baton.kv_transfer.local_pool import DevicePool, HostPool, memory_name, prepare_ucx
from baton.kv_transfer.nixl_mover import NixlMover
from baton.kv_transfer.segment_queue import SegmentQueue

ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


def filled(blocks: int = 6, block_bytes: int = 96) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)


def test_a_hosts_pool_is_its_array() -> None:
    array = filled()
    pool = HostPool(array, 3)
    assert (pool.address, pool.blocks, pool.block_bytes) == (array.ctypes.data, 6, 96)
    assert (pool.slabs, pool.memory, pool.device_id) == (3, "DRAM", 0)
    wanted = reference(array, [5, 0], [7, 8], 3)
    assert np.array_equal(pool.checksums([5, 0], [7, 8]), wanted)
    array[5, 1] ^= 4  # shared, not copied
    assert (pool.checksums([5, 0], [7, 8]) == wanted).all(axis=1).tolist() == [False, True]


@pytest.mark.parametrize("slabs", [0, 5, 7])
def test_slabs_of_broken_words_are_refused(slabs: int) -> None:
    with pytest.raises(ValueError, match=f"{slabs} slabs of 8-byte words"):
        HostPool(filled(), slabs)


@pytest.mark.parametrize(
    ("memory", "before", "after"),
    [("VRAM", {}, {ZCOPY: "on"}), ("VRAM", {ZCOPY: "auto"}, {ZCOPY: "auto"}), ("DRAM", {}, {})],
)
def test_ucx_gets_only_settings_a_device_needs_and_lacks(
    memory: str, before: dict[str, str], after: dict[str, str]
) -> None:
    prepare_ucx(memory, before)
    assert before == after


def test_places_are_named_for_people() -> None:
    assert memory_name("DRAM", 0) == "DRAM"
    assert memory_name("VRAM", 3) == "VRAM of device 3"


class Counting:
    """Sums of a device: those of host memory, and in which threads they were asked for."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.asked: list[tuple[str, list[int]]] = []

    def __call__(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        self.asked.append((threading.current_thread().name, list(blocks)))
        return self.pool.checksums(blocks, seeds)


async def test_both_ends_of_a_handoff_ask_the_pool_for_its_sums() -> None:
    """Over real READs; DRAM, since there is no device here, but with the sums of a DevicePool."""
    pytest.importorskip("nixl")
    theirs, ours = HostPool(filled(), 3), HostPool(np.zeros((4, 96), np.uint8), 3)
    summers = [Counting(theirs), Counting(ours)]
    pools = [
        DevicePool(p.address, p.blocks, p.block_bytes, 3, 0, s, lambda: None, memory="DRAM")
        for p, s in zip((theirs, ours), summers, strict=True)
    ]
    granter, reader = (NixlMover(p, bytes([n]) * 16) for n, p in enumerate(pools, 1))
    try:
        granter.hold_progress()
        described = granter.describe()
        assert (described.base_address, described.memory) == (theirs.address, "DRAM")
        await reader.connect(described)
        read = reader.read(described.boot_id, [5, 2], [0, 3], seeds=[7, 8])
        assert read.checksums is not None
        sums = await granter.checksums([5, 2], [7, 8])
        assert np.array_equal(await read.checksums, sums)
        assert np.array_equal(sums, reference(theirs.array, [5, 2], [7, 8], 3))
        assert np.array_equal(ours.array[[0, 3]], theirs.array[[5, 2]])
    finally:
        granter.drop_progress()
        await granter.close()
        await reader.close()
    ((granting, _),), ((reading, _),) = (s.asked for s in summers)
    assert granting.startswith("checksums") and reading.startswith("nixl-")
    assert [s.asked[0][1] for s in summers] == [[5, 2], [0, 3]]


async def test_a_devices_pool_is_described_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.kv_transfer import nixl_mover

    class Agent:
        metadata = b"m"
        versions = {"nixl": "1.5.1"}

        def __init__(
            self, pool: DevicePool, name: str, segments: SegmentQueue, share: tuple[int, int]
        ) -> None:
            self.names.append(name)

        names: list[str] = []

        def stop(self) -> None: ...

    monkeypatch.setattr(nixl_mover, "NixlAgent", Agent)
    nothing: Any = None
    pool = DevicePool(9 << 40, 10, 256, 2, 3, nothing, nothing)
    mover = NixlMover(pool, b"b" * 16, read_threads=4)
    found = mover.describe()
    assert (found.base_address, found.num_blocks, found.block_bytes) == (9 << 40, 10, 256)
    assert (found.memory, found.device_id, mover.slabs) == ("VRAM", 3, 2)
    assert len(Agent.names) == 1  # the device copies: one thread posts all READs
    await mover.close()
