"""Host memory in pages of 2 MiB, for what is read from end to end in every step.

With small pages the processor stops reading ahead at every 4 KiB: weights were measured to come
at 42 GB/s instead of 69. A kernel without huge pages gives small ones, and all else is the same.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

from baton.runtime.errors import OutOfMemory


def map_memory(size_bytes: int) -> mmap:
    """Map anonymous pages: aligned, zero, and taken from the system when first written. Raises
    OSError or OverflowError if the system refuses them."""
    memory = mmap(-1, size_bytes, MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(MADV_HUGEPAGE)
    return memory


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in such pages; the tensor keeps them. Raises OutOfMemory."""
    size_bytes = prod(shape) * dtype.itemsize
    try:
        memory = map_memory(size_bytes)
    except (OSError, OverflowError) as error:
        raise OutOfMemory(f"the system has no {size_bytes} bytes for a matrix") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)
