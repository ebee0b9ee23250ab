"""The checksum kernel against its definition, and the definition against kv_transfer's."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from baton.engine.triton import checksum as triton_checksum
from baton.engine.triton.checksum import ALGORITHM, block_checksums
from baton.kv_transfer.checksum import CHECKSUM_ALGORITHM
from baton.kv_transfer.checksum_numba import checksums
from tests.support.json_values import JsonObject


@pytest.mark.parametrize("name", ["of one short slab", "summed in parts"])
def test_parity(product_checks: dict[str, JsonObject], name: str) -> None:
    found = product_checks[f"checksum {name}"]
    assert found["good"], found["said"]


def test_the_definition_is_that_of_the_handoff(triton_parity: ModuleType) -> None:
    assert ALGORITHM == CHECKSUM_ALGORITHM
    words = np.random.default_rng(3).integers(0, 256, (5, 3 * 8 * 40), dtype=np.uint8)
    blocks, seeds = [4, 0, 4], [1, (1 << 64) - 1, 0xDEADBEEF12345678]
    wanted = checksums(words, blocks, seeds, 3).tolist()
    assert triton_parity.checksum_reference(words, blocks, seeds, 3) == wanted


def test_no_axis_of_a_launch_is_longer_than_cuda_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than the second and third axis of a grid can be long."""
    grids = []

    class Launch:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *given, **more: None

    monkeypatch.setattr(triton_checksum, "_sum_parts", Launch())
    monkeypatch.setattr(triton_checksum, "_finish", Launch())
    blocks = torch.zeros(70_000, dtype=torch.int64)
    slab = 8 * (2 * 16384 + 1)  # three parts
    block_checksums(torch.zeros(1, 2 * slab, dtype=torch.uint8), blocks, blocks, 2)
    assert grids == [(70_000, 2, 3), (140_000,)]


@pytest.mark.parametrize("slabs", [0, 3])
def test_a_slab_that_is_no_whole_number_of_words_is_refused(slabs: int) -> None:
    with pytest.raises(ValueError, match=f"{slabs} slabs of 8-byte words"):
        none = torch.zeros(0, dtype=torch.int64)
        block_checksums(torch.zeros(2, 64, dtype=torch.uint8), none, none, slabs)
