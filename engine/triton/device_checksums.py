"""Checksums of a GPU pool's blocks, computed for the mover.

They run beside the steps, on a stream of their own. The blocks are complete before the call (the
result of the step is known, or the READ has ended), so no step has to be waited for. Only block
numbers, seeds and checksums cross between host and device. Any thread may call; calls run one at a
time. The module does not know the content of the blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.triton.checksum import block_checksums

_HIGH_PRIORITY = -1  # of CUDA streams: a handoff waits for these few microseconds


class DeviceChecksums:
    """The checksum function of one pool. `blocks` has the pool's bytes, uint8 [pool blocks, block
    bytes], contiguous, on one device; a block has `slabs`. Raises ValueError if a slab is not a
    whole number of words."""

    def __init__(self, blocks: Tensor, slabs: int) -> None:
        self._blocks = blocks
        self._slabs = slabs
        self._turn = threading.Lock()
        cuda = blocks.device.type == "cuda"
        self._aside = OwnStream(blocks.device) if cuda else nullcontext()  # a CPU has no streams
        self((0,), (0,))  # compiles before serving

    def __call__(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        """Return checksums, uint64 [len(blocks), slabs]. Raises IndexError if a block is not in
        the pool, ValueError if the number of seeds differs from that of blocks."""
        index = np.asarray(blocks, dtype=np.int64)
        if index.size and (index.min() < 0 or index.max() >= self._blocks.shape[0]):
            raise IndexError(f"{list(blocks)}: one is not in a pool of {len(self._blocks)} blocks")
        if len(seeds) != len(index):
            raise ValueError(f"{len(seeds)} seeds for {len(index)} blocks")
        # Rows have an even length, since Triton compiles another kernel for unaligned addresses.
        given = np.zeros((2, len(index) + len(index) % 2), dtype=np.int64)
        given[0, : len(index)] = index
        given[1, : len(index)] = np.asarray(seeds, dtype=np.uint64).view(np.int64)
        with self._turn, self._aside:
            on_device, keys = torch.from_numpy(given).to(self._blocks.device)[:, : len(index)]
            sums = block_checksums(self._blocks, on_device, keys, self._slabs).cpu()
        return cast(NDArray[np.uint64], sums.numpy().view(np.uint64))


class OwnStream:
    """A stream of `device`. Within the `with` block, both are current; one thread at a time.

    Leaving a stream restores the previously current device. In a thread that never chose one, this
    is device 0, which then gets a context of hundreds of MiB. Leaving a device creates no context,
    so the device is the outer of the two."""

    def __init__(self, device: torch.device) -> None:
        self._device = cast(AbstractContextManager[object], torch.cuda.device(device))
        with self._device:
            own = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
            self._stream = cast(AbstractContextManager[object], torch.cuda.stream(own))

    def __enter__(self) -> None:
        self._device.__enter__()
        self._stream.__enter__()

    def __exit__(self, *raised: Any) -> None:
        try:
            self._stream.__exit__(*raised)
        finally:
            self._device.__exit__(*raised)


def enter_device(device: torch.device) -> None:
    """Make a GPU, with its context, current in the calling thread, for libraries that expect it."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
