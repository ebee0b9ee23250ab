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
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.triton_checksum import block_checksums

_URGENT = -1  # CUDA's greater priority: a handoff waits for these few microseconds


class DeviceSums:
    """`blocks` is a pool's bytes, uint8 [pool blocks, block bytes], contiguous, on one device;
    `slabs` those of a block. Raises ValueError if a slab is not a whole number of words."""

    def __init__(self, blocks: Tensor, slabs: int) -> None:
        self._blocks = blocks
        self._slabs = slabs
        self._turn = threading.Lock()
        self._stream: AbstractContextManager[object] = nullcontext()  # a host has none
        if blocks.device.type == "cuda":
            own = torch.cuda.Stream(blocks.device, priority=_URGENT)  # type: ignore[no-untyped-call]
            self._stream = cast(AbstractContextManager[object], torch.cuda.stream(own))
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
        with self._turn, self._stream:
            places, keys = torch.from_numpy(given).to(self._blocks.device)[:, : len(index)]
            sums = block_checksums(self._blocks, places, keys, self._slabs).cpu()
        return cast(NDArray[np.uint64], sums.numpy().view(np.uint64))


def enter_device(device: torch.device) -> None:
    """Make a GPU the calling thread's own, with its context, for libraries that ask for none."""
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
