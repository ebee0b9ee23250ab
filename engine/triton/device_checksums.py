"""Sums of a pool's blocks for whoever moves them: block numbers and seeds in, sums out.

Runs beside the steps, on a stream of its own: what it sums was complete before it was asked (a
step whose result is known, a READ that has landed), so it waits for no step. Only numbers and
sums cross to the host. Any thread may call it; one is served at a time. Knows nothing of what
the blocks hold.
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

_URGENT = -1  # CUDA's greater priority: a handoff waits for these few microseconds


class DeviceSums:
    """`blocks` is a pool's bytes, uint8 [pool blocks, block bytes], contiguous, on one device;
    `slabs` those of a block. Raises ValueError if a slab is not a whole number of words."""

    def __init__(self, blocks: Tensor, slabs: int) -> None:
        self._blocks = blocks
        self._slabs = slabs
        self._turn = threading.Lock()
        cuda = blocks.device.type == "cuda"
        self._aside = _OwnStream(blocks.device) if cuda else nullcontext()  # a host has no streams
        self((0,), (0,))  # compiled while the worker starts, not when the first READ lands

    def __call__(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        """uint64 [len(blocks), slabs]. Raises IndexError if a block is not in the pool,
        ValueError if there is not one seed for each."""
        index = np.asarray(blocks, dtype=np.int64)
        if index.size and (index.min() < 0 or index.max() >= self._blocks.shape[0]):
            raise IndexError(f"a block of {list(blocks)} is not in a pool of {len(self._blocks)}")
        if len(seeds) != len(index):
            raise ValueError(f"{len(seeds)} seeds for {len(index)} blocks")
        # Rows of an even length: an address that is at times odd would compile a second kernel.
        given = np.zeros((2, len(index) + len(index) % 2), dtype=np.int64)
        given[0, : len(index)] = index
        given[1, : len(index)] = np.asarray(seeds, dtype=np.uint64).view(np.int64)
        with self._turn, self._aside:
            places, keys = torch.from_numpy(given).to(self._blocks.device)[:, : len(index)]
            sums = block_checksums(self._blocks, places, keys, self._slabs).cpu()
        return cast(NDArray[np.uint64], sums.numpy().view(np.uint64))


class _OwnStream:
    """A stream of `device`, current while entered, the device too; one thread at a time.

    To leave a stream is to make current the device that was so before: in a thread that never
    chose one this is number 0, which then gets a context, hundreds of MiB. To leave a device
    (this is the outer of the two) makes no context."""

    def __init__(self, device: torch.device) -> None:
        self._device = cast(AbstractContextManager[object], torch.cuda.device(device))
        with self._device:
            own = torch.cuda.Stream(device, priority=_URGENT)  # type: ignore[no-untyped-call]
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
    """Make a GPU the calling thread's own, with its context, for libraries that ask for none."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
