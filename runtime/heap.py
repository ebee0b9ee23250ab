"""What this process has allocated and not freed: what a leak makes grow.

Pages in memory do not tell: a heap keeps holes, and a hole's first use takes a page without any
leak. Only glibc (2.33 and later) says so of its heap; Python says how many small objects it has.
Holds no state.
"""

from __future__ import annotations

import ctypes


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_LIBC = ctypes.CDLL(None)
TOLD = hasattr(_LIBC, "mallinfo2")
if TOLD:
    _LIBC.mallinfo2.restype = _Mallinfo


def allocated_bytes() -> int:
    """Of the C library's heap, mapped chunks included; Python's small objects lie elsewhere. 0
    where the C library does not tell."""
    if not TOLD:
        return 0
    heap = _LIBC.mallinfo2()
    return int(heap.uordblks + heap.hblkhd)
