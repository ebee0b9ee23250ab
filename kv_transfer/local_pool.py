"""The interface of the local pool for a mover: memory on a device, with a checksum function.

    HostPool      the host's memory; NumPy or numba computes checksums
    RankedPool    the pools of several ranks, as one
    DevicePool    a GPU's memory; the engine computes checksums there, so that no KV leaves it

The module knows no tensors and no NIXL. The engine owns the memory, which outlives the mover.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.block_sizes import BlockRatio, SlabRows, in_own_order
from baton.kv_transfer.checksum import SlabGroup, slab_groups
from baton.runtime.errors import ReadFailed

DRAM, VRAM = "DRAM", "VRAM"  # NIXL's memory types
MEMORY_KINDS = (DRAM, VRAM)

# From blocks and their seeds to uint64 [blocks, slabs]; see `checksum_numba.checksums`.
ChecksumFunction = Callable[[Sequence[int], Sequence[int]], NDArray[np.uint64]]

_OF_RANKS = "blocks of another size are not read into the pools of several ranks"
_OWN_SIZE = "blocks of another size are not read into a GPU's memory"

# Without this, UCX reads a GPU's memory over TCP if it finds no NVLink. A user's value stays.
_UCX_FOR_DEVICES = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}


@dataclass(frozen=True, slots=True)
class RankPool:
    """The memory of one rank's pool: its blocks, of `block_bytes`, follow each other."""

    address: int
    block_bytes: int
    device_id: int = 0


class LocalPool(Protocol):
    """The interface of a pool: `blocks` of `block_bytes` each, contiguous from `address` on; a
    block has `slabs` KV head slabs, of equal length within a layer group."""

    @property
    def address(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def slabs(self) -> int: ...

    @property
    def rank_pools(self) -> tuple[RankPool, ...]:
        """Return the pools of a worker's ranks, if each has one; see `RankPool`."""
        ...

    @property
    def kv_heads(self) -> int:
        """Return the KV heads of the target, without copies on several ranks."""
        ...

    @property
    def memory(self) -> str:
        """Return DRAM or VRAM."""
        ...

    @property
    def device_id(self) -> int:
        """Return the number of the VRAM's device in this process."""
        ...

    def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        """Same as `checksum_numba.checksums`. Several threads may call it at once; it holds the
        GIL only briefly."""
        ...

    def enter_thread(self) -> None:
        """Prepare the calling thread; called once in each thread before it uses the memory."""
        ...

    @property
    def bridges_sizes(self) -> bool:
        """Return whether blocks of another size can be read into this pool: only then are the two
        methods below called."""
        ...

    def landed_checksums(
        self, cells: Sequence[int], seeds: Sequence[int], ratio: BlockRatio
    ) -> NDArray[np.uint64]:
        """Return the checksums of a granter's blocks that have landed in these cells, `ratio.split`
        for each, [seeds, slabs]: the same as the granter's own."""
        ...

    def put_in_order(self, blocks: Sequence[int], filled: Sequence[int], ratio: BlockRatio) -> None:
        """Put what has landed in own blocks into the own order. `filled` has, for each block, or
        for each `ratio.split` of them, the number of the granter's blocks in it, which come first;
        the bytes of missing ones become 0."""
        ...


def landed_checksums(
    pool: LocalPool, cells: Sequence[int], seeds: Sequence[int], ratio: BlockRatio
) -> NDArray[np.uint64]:
    """Return the checksums of a granter's blocks that have landed in `pool`, with their seeds,
    [seeds, slabs]; where both sizes are alike, cells are own blocks."""
    if ratio.alike:
        return pool.checksums(cells, seeds)
    return pool.landed_checksums(cells, seeds, ratio)


class HostPool:
    """A pool in host memory: `array` uint8 [blocks, block_bytes], C-contiguous."""

    memory, device_id = DRAM, 0
    rank_pools: tuple[RankPool, ...] = ()

    def __init__(
        self,
        array: NDArray[np.uint8],
        slabs: int,
        draft: SlabGroup | None = None,
        rows: Sequence[SlabRows] = (),
    ) -> None:
        """Describe the memory. `slabs`: of the target's layer group, followed by those of `draft`.
        `rows`: of both, for READs of blocks of another size; without them there are none. Raises
        ValueError if a slab is not a whole number of words."""
        groups = slab_groups(array.shape[1], slabs, draft)
        self.array = array
        self.slabs = sum(group.slabs for group in groups)
        self.blocks, self.block_bytes = array.shape
        self.address = int(array.ctypes.data)
        self.kv_heads, self._draft = slabs, draft
        self._rows = tuple(rows)

    @property
    def bridges_sizes(self) -> bool:
        return bool(self._rows)

    def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        return self._checksums_of(self.array, blocks, seeds)

    def landed_checksums(
        self, cells: Sequence[int], seeds: Sequence[int], ratio: BlockRatio
    ) -> NDArray[np.uint64]:
        if ratio.joined > 1:
            width = self.block_bytes // ratio.joined
            return self._checksums_of(self.array.reshape(-1, width), cells, seeds)
        landed = self.array[list(cells)].reshape(len(seeds), -1)
        return self._checksums_of(landed, range(len(seeds)), seeds)

    def put_in_order(self, blocks: Sequence[int], filled: Sequence[int], ratio: BlockRatio) -> None:
        own = np.asarray(blocks, dtype=np.int64)
        landed = self.array[own].reshape(len(filled), -1)
        width = landed.shape[1] // ratio.joined
        for row, cells in zip(landed, filled, strict=True):
            row[cells * width :] = 0
        self.array[own] = in_own_order(landed, self._rows, ratio).reshape(len(own), -1)

    def enter_thread(self) -> None:
        return  # any thread can use it

    def _checksums_of(
        self, stored: NDArray[np.uint8], blocks: Sequence[int], seeds: Sequence[int]
    ) -> NDArray[np.uint64]:
        """Return the checksums of some blocks of `stored`, [any blocks, bytes of a block of any
        size], whose slabs are those of this pool's."""
        from baton.kv_transfer import checksum_numba  # needs numba, which GPU workers lack

        draft = self._draft
        if draft is not None:
            slab_bytes = draft.slab_bytes * stored.shape[1] // self.block_bytes
            draft = SlabGroup(draft.slabs, slab_bytes)
        return checksum_numba.checksums(stored, blocks, seeds, self.kv_heads, draft)


@dataclass(frozen=True, slots=True)
class DevicePool:
    """A pool in a GPU's memory. `compute_checksums` runs `checksum.CHECKSUM_ALGORITHM` there;
    `enter` makes the device current in the calling thread, as CUDA requires for each thread."""

    address: int
    blocks: int
    block_bytes: int
    slabs: int
    device_id: int
    compute_checksums: ChecksumFunction
    enter: Callable[[], None]
    memory: str = VRAM

    bridges_sizes: bool = False
    rank_pools: tuple[RankPool, ...] = ()

    @property
    def kv_heads(self) -> int:
        return self.slabs

    def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        return self.compute_checksums(blocks, seeds)

    def landed_checksums(
        self, cells: Sequence[int], seeds: Sequence[int], ratio: BlockRatio
    ) -> NDArray[np.uint64]:
        raise ReadFailed(_OWN_SIZE)  # the handshake refuses such a peer

    def put_in_order(self, blocks: Sequence[int], filled: Sequence[int], ratio: BlockRatio) -> None:
        raise ReadFailed(_OWN_SIZE)

    def enter_thread(self) -> None:
        self.enter()


class RankedPool:
    """The pools of all ranks of a worker, in their order, each with the KV heads of its rank.

        block b of the worker    | block b of rank 0's pool | block b of rank 1's | ...

    With more ranks than KV heads, several ranks hold the same head; all of these copies are slabs
    of the block, read and verified each by itself."""

    bridges_sizes = False

    def __init__(self, pools: Sequence[LocalPool], kv_heads: int) -> None:
        """Raises ValueError unless the pools are alike."""
        first = pools[0]
        alike = {(each.blocks, each.block_bytes, each.slabs, each.memory) for each in pools}
        if len(alike) != 1:
            raise ValueError(f"the pools of {len(pools)} ranks differ: {sorted(alike)}")
        self._pools = tuple(pools)
        self.kv_heads = kv_heads
        self.address, self.blocks = first.address, first.blocks
        self.memory, self.device_id = first.memory, first.device_id
        self.block_bytes = sum(each.block_bytes for each in pools)
        self.slabs = sum(each.slabs for each in pools)
        self.rank_pools = tuple(
            RankPool(each.address, each.block_bytes, each.device_id) for each in pools
        )

    def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        return np.concatenate([each.checksums(blocks, seeds) for each in self._pools], axis=1)

    def landed_checksums(
        self, cells: Sequence[int], seeds: Sequence[int], ratio: BlockRatio
    ) -> NDArray[np.uint64]:
        raise ReadFailed(_OF_RANKS)  # the handshake refuses such a peer

    def put_in_order(self, blocks: Sequence[int], filled: Sequence[int], ratio: BlockRatio) -> None:
        raise ReadFailed(_OF_RANKS)

    def enter_thread(self) -> None:
        for each in reversed(self._pools):  # the first one's device stays current
            each.enter_thread()


def prepare_ucx(memory: str, environ: MutableMapping[str, str]) -> None:
    """Set the environment that UCX needs for a pool in `memory`, before UCX starts."""
    if memory == VRAM:
        for name, value in _UCX_FOR_DEVICES.items():
            environ.setdefault(name, value)


def memory_name(memory: str, device_id: int) -> str:
    """Return a readable name: "DRAM" or "VRAM of device 1"."""
    return memory if memory == DRAM else f"{memory} of device {device_id}"
