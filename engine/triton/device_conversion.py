"""Conversion of a GPU pool's blocks to the KV dtype of a reader, with checksums.

It runs beside the steps, on a stream of its own, as checksums do (device_checksums.py): the blocks
are complete before the call, and nothing else uses the targets. Implements the handoff's
`Conversion`, of which the module knows nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.memory.kv_conversion import KvConversion
from baton.engine.memory.kv_pool import KvPool
from baton.engine.triton.checksum import block_checksums
from baton.engine.triton.device_checksums import OwnStream


class DeviceConversion:
    """The conversion of `pool`, which has no draft's KV, by `engine` to `kv_dtype`."""

    def __init__(self, pool: KvPool, engine: KvConversion, kv_dtype: str) -> None:
        self.kv_dtype = kv_dtype
        self.block_bytes = engine.block_bytes
        self.parts = -(-engine.block_bytes // pool.block_bytes)
        self._stored = pool.bytes_tensor()
        self._slabs = pool.slabs
        self._engine = engine
        self._turn = threading.Lock()
        device = self._stored.device
        self._aside = OwnStream(device) if device.type == "cuda" else nullcontext()

    def convert(
        self, sources: Sequence[int], targets: Sequence[int], seeds: Sequence[int]
    ) -> NDArray[np.uint64]:
        """Convert `sources` into `targets`, `parts` blocks for each, and return the checksums of
        what was written, uint64 [sources, slabs], once it is."""
        device, width = self._stored.device, self._stored.shape[1]
        keys = np.asarray(seeds, dtype=np.uint64).view(np.int64)
        with self._turn, self._aside:
            content = self._engine.converted(sources)
            index = torch.tensor(targets, dtype=torch.int64, device=device)
            blocks = index.view(len(sources), self.parts)
            for part in range(self.parts):
                piece = content[:, part * width : (part + 1) * width]
                self._stored[blocks[:, part], : piece.shape[1]] = piece
            rows = torch.arange(len(sources), device=device)
            seeded = torch.from_numpy(keys).to(device)
            sums = block_checksums(content, rows, seeded, self._slabs).cpu()
        return cast(NDArray[np.uint64], sums.numpy().view(np.uint64))
