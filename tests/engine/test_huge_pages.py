from __future__ import annotations

import gc
from mmap import PAGESIZE

import pytest
import torch

import baton.engine.memory.huge_pages as huge_pages
from baton.engine.memory.huge_pages import map_memory, zeros
from baton.runtime.errors import OutOfMemory


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
