from __future__ import annotations

import gc
from mmap import MADV_NOHUGEPAGE, PAGESIZE
from resource import RUSAGE_SELF, getrusage

import pytest
import torch

import baton.engine.memory.huge_pages as huge_pages
from baton.engine.memory.huge_pages import map_memory, populate, zeros
from baton.runtime.errors import OutOfMemory

HUGE_PAGE = 2 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_zeros_of_a_shape(dtype: torch.dtype) -> None:
    found = zeros((3, 5, 2), dtype)
    assert (found.shape, found.dtype) == ((3, 5, 2), dtype)
    assert (found == 0).all()
    assert found.data_ptr() % PAGESIZE == 0


def test_the_memory_lives_as_long_as_a_view() -> None:
    view = zeros((1000,), torch.int64).fill_(7)[500:]
    gc.collect()
    assert (view == 7).all()


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "MADV_HUGEPAGE", 12345)  # which no kernel knows
    assert bytes(map_memory(10)[:10]) == bytes(10)


def test_too_much_is_refused() -> None:
    with pytest.raises((OSError, OverflowError)):
        map_memory(1 << 62)
    with pytest.raises(OutOfMemory, match="no 4611686018427387904 bytes"):
        zeros((1 << 60,), torch.float32)


@pytest.mark.parametrize("huge", [True, False])
def test_populated_memory_needs_no_page_fault(huge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the memory is populated, so writing all of it faults on the other half alone."""
    if not huge:
        monkeypatch.setattr(huge_pages, "MADV_HUGEPAGE", MADV_NOHUGEPAGE)
    size_bytes = 64 << 20
    memory = zeros((size_bytes,), torch.uint8)
    memory[:5] = 7
    populate(memory, size_bytes // 2)
    assert memory[:6].tolist() == [7] * 5 + [0]
    torch.empty(size_bytes // 2, dtype=torch.uint8).fill_(1)  # threads and code have their pages
    faults = []
    for half in memory.chunk(2):
        before = getrusage(RUSAGE_SELF).ru_minflt
        half.fill_(1)
        faults.append(getrusage(RUSAGE_SELF).ru_minflt - before)
    least = size_bytes // 2 // (HUGE_PAGE if huge else PAGESIZE)
    assert faults[0] < least // 2 < faults[1]


def test_a_system_that_cannot_populate_does_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_MADV_POPULATE_WRITE", 12345)  # which no kernel knows
    memory = zeros((1 << 20,), torch.uint8)
    populate(memory, 1 << 20)
    populate(memory[:10], 10)  # no whole page
    assert not memory.any()
