"""Latent attention's kernel: its tiles; parity is held under triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from baton.engine.triton.mla import latent_tiles, write_latents
from tests.support.json_values import JsonObject


def test_results_are_those_of_the_reference(latent_checks: dict[str, JsonObject]) -> None:
    wrong = {name: found["said"] for name, found in latent_checks.items() if not found["good"]}
    assert wrong == {}
    for word in ("by count", "fixed", "bfloat16", "bits", "noticed", "int8", "fp8_e4m3, determ"):
        assert any(word in name for name in latent_checks), word


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 16, 20, 128])
def test_tiles_are_what_a_matrix_product_takes(heads: int, dtype: torch.dtype) -> None:
    tiles = latent_tiles(heads, dtype)
    assert tiles.rows >= 16 and tiles.rows & (tiles.rows - 1) == 0
    assert tiles.tokens >= 16 and tiles.tokens & (tiles.tokens - 1) == 0


def test_no_rows_launch_nothing() -> None:
    """Without a GPU a launch would fail."""
    slots = torch.empty(0, dtype=torch.int64)
    write_latents(torch.empty(0, 24), torch.empty(1, 8, 24), None, slots, slots, 16)
