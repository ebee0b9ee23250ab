"""RoPE and KV write: held to `rope.rotate` and a plain scatter, under triton's interpreter."""

from __future__ import annotations

import torch

from baton.engine.triton.kv_write import rotate_and_write
from tests.support.json_values import JsonObject


def test_results_are_those_of_torch(step_checks: dict[str, JsonObject]) -> None:
    results = {k: v for k, v in step_checks.items() if k.startswith("write,")}
    assert {name for name, found in results.items() if not found["good"]} == set()
    for word in ("whole heads", "a part of a head", "float32", "bfloat16", "norms", "int8"):
        assert any(word in name for name in results), word


def test_no_rows_launch_nothing() -> None:
    """Without a GPU a launch would fail."""
    heads, slots = torch.empty(0, 2, 16), torch.empty(0, dtype=torch.int64)
    angles = torch.empty(0, 1, 16)
    kv = torch.empty(1, 2, 2, 8, 16)
    out = rotate_and_write(heads, heads, heads, (angles, angles), kv, slots, slots)
    assert out.shape == (0, 2, 16)
