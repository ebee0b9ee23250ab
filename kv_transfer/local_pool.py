"""The local pool as a mover sees it: plain memory on some device, with a checksum function.

    HostPool      the host's memory; NumPy or numba sums its blocks
    DevicePool    a GPU's memory; the engine sums its blocks there, so that no KV leaves it

Knows no tensors and no NIXL. The memory belongs to the engine and outlives the mover.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.checksum import SlabGroup, slab_groups

DRAM, VRAM = "DRAM", "VRAM"  # NIXL's names of the kinds of memory
MEMORY_KINDS = (DRAM, VRAM)

# from blocks and their seeds to uint64 [blocks, slabs], as `checksum_numba.checksums`
Summing = Callable[[Sequence[int], Sequence[int]], NDArray[np.uint64]]

# Without this UCX reads a GPU's memory over TCP where it sees no NVLink; a user's value stays.
_UCX_FOR_DEVICES = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}


class LocalPool(Protocol):
    """`blocks` of `block_bytes` each from `address` on, without gaps; a block has `slabs` KV head
    slabs, equally long within a layer group."""

    @property
    def address(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def slabs(self) -> int: ...

    @property
    def memory(self) -> str:
        """DRAM or VRAM."""
        ...

    @property
    def device_id(self) -> int:
        """The number of the VRAM's device in this process."""
        ...

    def sums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        """Same as `checksum_numba.checksums`. Several threads may call it at once; it does not
        hold the GIL for long."""
        ...

    def enter_thread(self) -> None:
        """Called once in each thread that will touch the memory, before it does."""
        ...


class HostPool:
    """A pool in host memory: `array` uint8 [blocks, block_bytes], C-contiguous."""

    memory, device_id = DRAM, 0

    def __init__(
        self, array: NDArray[np.uint8], slabs: int, draft: SlabGroup | None = None
    ) -> None:
        """`slabs` of the target's layer group; `draft` has those of a draft model behind them.
        Raises ValueError if a slab is not a whole number of words."""
        groups = slab_groups(array.shape[1], slabs, draft)
        self.array = array
        self.slabs = sum(group.slabs for group in groups)
        self.blocks, self.block_bytes = array.shape
        self.address = int(array.ctypes.data)
        self._target_slabs, self._draft = slabs, draft

    def sums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        from baton.kv_transfer import checksum_numba  # it needs numba, which a GPU worker lacks

        return checksum_numba.checksums(self.array, blocks, seeds, self._target_slabs, self._draft)

    def enter_thread(self) -> None:
        return  # any thread may


@dataclass(frozen=True, slots=True)
class DevicePool:
    """A pool in a GPU's memory. `summing` computes `checksum.CHECKSUM_ALGORITHM` there; `enter`
    makes the device current in the calling thread, which CUDA wants of each."""

    address: int
    blocks: int
    block_bytes: int
    slabs: int
    device_id: int
    summing: Summing
    enter: Callable[[], None]
    memory: str = VRAM

    def sums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        return self.summing(blocks, seeds)

    def enter_thread(self) -> None:
        self.enter()


def prepare_ucx(memory: str, environ: MutableMapping[str, str]) -> None:
    """Set the environment that UCX needs for a pool in `memory`, before it starts."""
    if memory == VRAM:
        for name, value in _UCX_FOR_DEVICES.items():
            environ.setdefault(name, value)


def memory_name(memory: str, device_id: int) -> str:
    """Return a name for operators: "DRAM", "VRAM of device 1"."""
    return memory if memory == DRAM else f"{memory} of device {device_id}"
