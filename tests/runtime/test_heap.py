"""What is allocated is told to the byte, whatever pages the heap has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.runtime import heap

MIB = 1 << 20
TAKE_AND_GIVE_BACK = """
import ctypes, gc, sys
from baton.runtime import heap

size, count = map(int, sys.argv[1:])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
gc.disable()
before = heap.allocated_bytes()
taken = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size))) for _ in range(count)]
during = heap.allocated_bytes()
for pointer in taken:
    libc.free(pointer)
print(during - before, heap.allocated_bytes() - before)
"""


@pytest.mark.skipif(not heap.TOLD, reason="needs glibc 2.33, which tells what is allocated")
@pytest.mark.parametrize("size", [1000, 64 * MIB])
def test_what_is_taken_and_given_back_is_seen(own_process: Callable[..., str], size: int) -> None:
    """Small ones from the heap, a large one as a mapping of its own."""
    count = max(1, MIB // size)
    during, after = map(int, own_process(TAKE_AND_GIVE_BACK, size, count).split())
    assert during == pytest.approx(size * count, rel=0.1)
    assert abs(after) < MIB // 20


def test_a_c_library_that_does_not_tell_gives_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "TOLD", False)
    assert heap.allocated_bytes() == 0
