"""Chunked prefill: how chunks are cut, and the kernel's parity."""

from __future__ import annotations

import pytest
import torch

from baton.engine.triton.prefill import PrefillChunk, plan_prefill, prefill_tiles
from baton.engine.triton.tile import Tiles
from tests.support.json_values import JsonObject

TILES = Tiles(16, 16, 4, 1)


def test_results_are_those_of_attention_written_out(
    attention_checks: dict[str, JsonObject],
) -> None:
    results = {k: v for k, v in attention_checks.items() if k.startswith("prefill attention")}
    wrong = {name: found for name, found in results.items() if not found["good"]}
    assert wrong == {}
    for word in ("float32", "float16", "bfloat16", "window", "soft cap", "seven", "odd", "cut"):
        assert any(word in name for name in results), word


@pytest.mark.parametrize("group", [1, 3, 4, 7, 16])
def test_tiles_cover_every_token_once(group: int) -> None:
    chunks = [PrefillChunk(4, 1, 90, 0), PrefillChunk(5, 33, 0, 1), PrefillChunk(38, 16, 7, 2)]
    plan = plan_prefill(chunks, torch.zeros(3, 9, dtype=torch.int32), group, TILES)
    assert plan.tiles.dtype == torch.int32
    covered = {}
    for table, first, count, position in plan.tiles.tolist():
        assert 1 <= count * group <= TILES.rows
        for token in range(count):
            assert covered.setdefault(first + token, (table, position + token)) is not None
    assert sum(plan.tiles[:, 2].tolist()) == len(covered) == 50
    for chunk in chunks:
        for token in range(chunk.count):
            assert covered[chunk.first + token] == (chunk.table, chunk.start + token)


def test_tiles_with_the_most_keys_come_first() -> None:
    chunks = [PrefillChunk(0, 40, 0, 0), PrefillChunk(40, 2, 500, 1), PrefillChunk(42, 20, 30, 2)]
    plan = plan_prefill(chunks, torch.zeros(3, 32, dtype=torch.int32), 2, TILES)
    ends = (plan.tiles[:, 2] + plan.tiles[:, 3]).tolist()
    assert ends == sorted(ends, reverse=True)
    assert ends[0] == 502


def test_no_chunks_make_no_tiles() -> None:
    assert plan_prefill([], torch.zeros(0, 0, dtype=torch.int32), 2, TILES).tiles.shape == (0, 4)


def test_a_group_larger_than_a_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="17 query heads"):
        plan_prefill([PrefillChunk(0, 2, 0, 0)], torch.zeros(1, 1, dtype=torch.int32), 17, TILES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 8, 71, 128])
def test_every_group_fits_its_tile(group: int, dtype: torch.dtype) -> None:
    for dim in (64, 96, 128, 256):
        tiles = prefill_tiles(group, dim, dtype, capability=80)
        assert tiles.rows >= group and tiles.rows & (tiles.rows - 1) == 0
