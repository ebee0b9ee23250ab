"""The memory that the processes of a worker's ranks share.

The leader creates it and sends its file descriptor to the ranks that it starts. The memory has no
name, so the kernel frees it even if all ranks are killed. The module knows no layout.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray


class SharedMemory:
    """Zero-filled bytes behind a file descriptor."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map `size_bytes` of the memory behind `descriptor`, which the caller closes. Raises
        OSError if it cannot be mapped."""
        self.descriptor, self.size_bytes = descriptor, size_bytes
        self._map = mmap.mmap(descriptor, size_bytes)
        with suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)  # if the system supports it

    @staticmethod
    def create(size_bytes: int) -> SharedMemory:
        """Create memory whose pages the system allocates when they are first written. Raises
        OSError or OverflowError if it refuses the size."""
        descriptor = os.memfd_create("baton-ranks")
        try:
            os.ftruncate(descriptor, size_bytes)
            return SharedMemory(descriptor, size_bytes)
        except BaseException:  # nothing else closes the descriptor
            os.close(descriptor)
            raise

    def array(self) -> NDArray[np.uint8]:
        """Return all bytes as a view that keeps the mapping."""
        return np.frombuffer(self._map, dtype=np.uint8)
