"""Split decode: how rows are cut, and the kernels' parity."""

from __future__ import annotations

import pytest
import torch

from baton.engine.triton.decode import (
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    Splits,
    choose_splits,
    decode_tiles,
    fixed_splits,
)
from tests.support.json_values import JsonObject

H200 = 132  # multiprocessors


def test_results_are_those_of_attention_written_out(
    attention_checks: dict[str, JsonObject],
) -> None:
    results = {k: v for k, v in attention_checks.items() if k.startswith("decode attention")}
    wrong = {name: found for name, found in results.items() if not found["good"]}
    assert wrong == {}
    for word in ("float32", "float16", "bfloat16", "window", "soft cap", "seven", "odd", "batch"):
        assert any(word in name for name in results), word


@pytest.mark.parametrize(("rows", "most"), [(1, 2), (2, 2), (4, 2), (8, 3), (16, 3)])
def test_few_long_sequences_load_all_processors_alike(rows: int, most: int) -> None:
    splits = choose_splits(rows, 8, 100_000, H200)
    assert splits.tokens == 0
    assert 0.9 * most * H200 <= rows * 8 * splits.programs <= most * H200


def test_rows_that_load_processors_unevenly_are_split() -> None:
    """20 sequences of 8 KV heads are 1.2 programs a processor: unsplit, most would be idle."""
    assert choose_splits(20, 8, 100_000, H200).programs > 1


def test_rows_that_fill_the_device_are_not_split() -> None:
    assert choose_splits(64, 8, 100_000, H200) == Splits(1)
    assert choose_splits(256, 8, 100_000, H200) == Splits(1)
    assert choose_splits(1000, 2, 100_000, H200) == Splits(1)


def test_short_sequences_are_not_split_for_nothing() -> None:
    assert choose_splits(1, 1, 1, H200) == Splits(1)
    assert choose_splits(1, 1, MIN_SPLIT_TOKENS, H200) == Splits(1)
    assert choose_splits(1, 1, 3 * MIN_SPLIT_TOKENS, H200).programs <= 3
    assert choose_splits(1, 1, 1 << 20, H200).programs <= MAX_SPLITS


@pytest.mark.parametrize("longest", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("first", [0, 1, 63])
def test_fixed_splits_have_room_for_every_row(longest: int, first: int) -> None:
    """A window lets the first split begin up to a tile before the tokens it needs."""
    splits = fixed_splits(4, 2, longest, H200, 256)
    assert splits.tokens == 256
    assert 1 <= splits.programs <= max(-(-longest // 256), 1)
    assert splits.capacity(longest, 64) * 256 >= longest + first


def test_splits_by_count_have_a_place_each() -> None:
    assert Splits(7).capacity(123_456, 64) == 7


@pytest.mark.parametrize("group", [1, 2, 7, 16, 17, 71])
def test_a_group_is_one_matrix(group: int) -> None:
    tiles = decode_tiles(group, 128, torch.bfloat16)
    assert tiles.rows >= max(group, 16) and tiles.rows & (tiles.rows - 1) == 0


def test_rows_that_fill_the_device_get_smaller_stages() -> None:
    few, many = (decode_tiles(4, 128, torch.bfloat16, filled=filled) for filled in (False, True))
    assert few.stages * few.tokens < many.stages * many.tokens * 2 and few.stages > many.stages
