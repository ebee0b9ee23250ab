"""What NIXL makes of the descriptors of a READ: one for each run that is consecutive at both ends.

The agents here are NIXL's own, with the descriptor lists of the mover's agents, since only NIXL's
telemetry tells how many descriptors it posted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.nixl_library import every_block, load_bindings
from baton.kv_transfer.read_shape import read_shape

pytest.importorskip("nixl")

BLOCKS, BLOCK_BYTES = 64, 4096

Reads = Callable[[list[int], list[int]], int]  # blocks there and here: to the descriptors


class Pair:
    """Two agents of this process with a pool each; the granter's block i is filled with i."""

    def __init__(self) -> None:
        bindings = load_bindings()
        config = bindings.nixl_agent_config(
            backends=[], enable_prog_thread=False, capture_telemetry=True
        )
        self.pools: list[NDArray[np.uint8]] = []
        self.agents = []
        for name in ("reader", "granter"):
            pool = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
            agent = bindings.nixl_agent(name, config)
            agent.create_backend("UCX", {})
            agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
            self.pools.append(pool)
            self.agents.append(agent)
        self.pools[1] += np.arange(BLOCKS, dtype=np.uint8)[:, None]
        self.peer = self.agents[0].add_remote_agent(self.agents[1].get_agent_metadata())

    def _list(self, owner: str, number: int, rows: list[tuple[int, int]]) -> Any:
        pool = self.pools[number]
        described = PeerPool(b"", "", b"", pool.ctypes.data, BLOCK_BYTES, BLOCKS)
        return self.agents[0].prep_xfer_dlist(
            owner, every_block(described, [(0, *row) for row in rows]), "DRAM"
        )

    def descriptors(self, remote: list[int], local: list[int], unit_bytes: int) -> int:
        """Read units of one block each; return how many descriptors NIXL posted."""
        reader, granter = self.agents
        shape = read_shape(unit_bytes, BLOCK_BYTES, BLOCK_BYTES)
        theirs = self._list(self.peer, 1, [(c.granter_offset, c.length) for c in shape.cuts])
        ours = self._list("NIXL_INIT_AGENT", 0, [(c.reader_offset, c.length) for c in shape.cuts])
        ends = (np.array(blocks, dtype=np.int32) for blocks in (local, remote))
        own, far = next(ends), next(ends)
        handle = reader.make_prepped_xfer("READ", ours, own, theirs, far)
        state = reader.transfer(handle)
        while state == "PROC":
            granter.get_new_notifs()
            state = reader.check_xfer_state(handle)
        assert state == "DONE"
        assert (self.pools[0][own, :unit_bytes] == far.astype(np.uint8)[:, None]).all()
        count: int = reader.get_xfer_telemetry(handle).descCount
        for each in (handle, theirs, ours):
            each.release()
        return count


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    yield Pair()


@pytest.mark.parametrize(
    ("remote", "local", "count"),
    [
        (list(range(64)), list(range(64)), 1),
        (list(range(30, 40)), list(range(3, 13)), 1),  # elsewhere in each pool
        ([1, 2, 3, 9, 10], [7, 8, 9, 10, 11], 2),  # a gap at the granter
        ([1, 2, 3, 4], [5, 6, 20, 21], 2),  # a gap at the reader
        ([1, 2, 3, 7, 8], [5, 6, 20, 21, 22], 3),  # one at each, not at the same block
        ([3, 2, 1], [3, 2, 1], 3),  # descending
    ],
)
def test_consecutive_blocks_are_one_descriptor(
    pair: Pair, remote: list[int], local: list[int], count: int
) -> None:
    assert pair.descriptors(remote, local, BLOCK_BYTES) == count


def test_units_shorter_than_their_blocks_are_not_merged(pair: Pair) -> None:
    assert pair.descriptors([1, 2, 3], [1, 2, 3], BLOCK_BYTES // 2) == 3
