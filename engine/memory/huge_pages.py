"""Host memory in pages of 2 MiB, for data that every step reads from end to end.

With small pages the processor stops prefetching at every 4 KiB: weights were read at 42 GB/s
instead of 69. A kernel without huge pages maps small ones; nothing else differs.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

from baton.runtime.errors import OutOfMemory


def map_memory(size_bytes: int) -> mmap:
    """Map anonymous pages: aligned, zero, and allocated when first written. Raises OSError or
    OverflowError if the system refuses them."""
    memory = mmap(-1, size_bytes, MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(MADV_HUGEPAGE)
    return memory


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros that owns such pages. Raises OutOfMemory."""
    size_bytes = prod(shape) * dtype.itemsize
    try:
        memory = map_memory(size_bytes)
    except (OSError, OverflowError) as error:
        raise OutOfMemory(f"the system has no {size_bytes} bytes for a matrix") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)
