"""The interface of the local pool for a mover: memory on a device, with a checksum function.

    HostPool      the host's memory; NumPy or numba computes checksums
    DevicePool    a GPU's memory; the engine computes checksums there, so that no KV leaves it

The module knows no tensors and no NIXL. The engine owns the memory, which outlives the mover.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.checksum import SlabGroup, slab_groups

DRAM, VRAM = "DRAM", "VRAM"  # NIXL's memory types
MEMORY_KINDS = (DRAM, VRAM)

# From blocks and their seeds to uint64 [blocks, slabs]; see `checksum_numba.checksums`.
ChecksumFunction = Callable[[Sequence[int], Sequence[int]], NDArray[np.uint64]]

# Without this, UCX reads a GPU's memory over TCP if it finds no NVLink. A user's value stays.
_UCX_FOR_DEVICES = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}


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


class HostPool:
    """A pool in host memory: `array` uint8 [blocks, block_bytes], C-contiguous."""

    memory, device_id = DRAM, 0

    def __init__(
        self, array: NDArray[np.uint8], slabs: int, draft: SlabGroup | None = None
    ) -> None:
        """Describe the memory. `slabs`: of the target's layer group, followed by those of `draft`.
        Raises ValueError if a slab is not a whole number of words."""
        groups = slab_groups(array.shape[1], slabs, draft)
        self.array = array
        self.slabs = sum(group.slabs for group in groups)
        self.blocks, self.block_bytes = array.shape
        self.address = int(array.ctypes.data)
        self._target_slabs, self._draft = slabs, draft

    def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        from baton.kv_transfer import checksum_numba  # needs numba, which GPU workers lack

        return checksum_numba.checksums(self.array, blocks, seeds, self._target_slabs, self._draft)

    def enter_thread(self) -> None:
        return  # any thread can use it


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

    def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        return self.compute_checksums(blocks, seeds)

    def enter_thread(self) -> None:
        self.enter()


def prepare_ucx(memory: str, environ: MutableMapping[str, str]) -> None:
    """Set the environment that UCX needs for a pool in `memory`, before UCX starts."""
    if memory == VRAM:
        for name, value in _UCX_FOR_DEVICES.items():
            environ.setdefault(name, value)


def memory_name(memory: str, device_id: int) -> str:
    """Return a readable name: "DRAM" or "VRAM of device 1"."""
    return memory if memory == DRAM else f"{memory} of device {device_id}"
