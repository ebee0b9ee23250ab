"""Host memory in pages of 2 MiB, for data that every step reads from end to end.

With small pages the processor stops prefetching at every 4 KiB: weights were read at 42 GB/s
instead of 69. A kernel without huge pages maps small ones; nothing else differs.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from math import prod
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap

import torch
from torch import Tensor

from baton.runtime.errors import OutOfMemory

_MADV_POPULATE_WRITE = 23  # of Linux 5.14; the module mmap does not name it


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


def populate(memory: Tensor, most_bytes: int) -> None:
    """Let the system allocate the first `most_bytes` of a host tensor now, and not while a request
    waits for its first write to them. What they hold stays. A system that cannot do so allocates
    them at that write; nothing else differs."""
    first = -(-memory.data_ptr() // PAGESIZE) * PAGESIZE
    size_bytes = memory.data_ptr() + min(memory.nbytes, most_bytes) - first
    if size_bytes > 0:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        advise(first, size_bytes, _MADV_POPULATE_WRITE)
