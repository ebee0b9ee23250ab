"""The memory of this process: bytes allocated, and when Python collects reference cycles.

A worker has half a million objects once its modules are loaded. Python runs a full collection only
when a quarter as many objects have survived since the last one, and then stops the process for a
tenth of a second. Until then the cycles that requests leave (gRPC's calls, connections) stay in
memory, which looks like a leak of hours. Objects that `freeze_startup_objects` sets apart cost no
collection any time, so collections come as often as there is something to collect.

Where few cycles arise that is still seldom, and Python keeps up to 2,000 dead tuples of each length
for reuse, which looks like a leak too. A full collection frees them, so `collect_periodically` runs
one every minute. The collector's state belongs to the process; this module holds none.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time

FULL_COLLECTION_S = 60.0  # between full collections
COLLECTION_SHARE = 1000  # full collections take at most one part in so many of the time
THRESHOLDS = (700, 10, 2)  # new objects, then collections of each younger generation


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
HEAP_IS_REPORTED = hasattr(_LIBC, "mallinfo2")  # glibc 2.33 and later
if HEAP_IS_REPORTED:
    _LIBC.mallinfo2.restype = _Mallinfo


def allocated_bytes() -> int:
    """Return the bytes allocated and not freed in the C library's heap, mapped chunks included.

    Resident pages do not show a leak: the heap keeps holes, and the first use of a hole takes a
    page. Python's small objects lie elsewhere. Returns 0 where the C library has no report."""
    if not HEAP_IS_REPORTED:
        return 0
    heap = _LIBC.mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


def freeze_startup_objects() -> None:
    """Exclude all objects that live now from collections, until the next call of this function,
    which collects those that have died since. Takes a tenth of a second; call it before serving.

    A full collection then comes after about 20,000 new objects instead of 80,000. It also frees
    the dead tuples that Python keeps for reuse: without it, a worker that serves one request a
    second looks for an hour as if it leaked."""
    gc.set_threshold(*THRESHOLDS)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing, so that Python counts a quarter of nothing


async def collect_periodically() -> None:
    """Run a full collection every FULL_COLLECTION_S, less often where one takes long. Runs until
    it is cancelled."""
    while True:
        began_s = time.perf_counter()
        gc.collect()
        spent_s = time.perf_counter() - began_s
        # Collections may take only a share of the process's time.
        await asyncio.sleep(max(FULL_COLLECTION_S, COLLECTION_SHARE * spent_s))
