"""The benchmark of KV in eight bits: its arithmetic, and what it finds out about exactness."""

from __future__ import annotations

import dataclasses

import pytest

from baton.engine.spec.model_spec import read_spec
from baton.models.embedded import embedded_model
from benchmarks import quantized_kv


@pytest.mark.parametrize(
    ("mine", "theirs", "alike"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 5, 3], 1), ([4], [5], 0), ([], [], 0)],
)
def test_tokens_alike_before_the_first_other_one(
    mine: list[int], theirs: list[int], alike: int
) -> None:
    assert quantized_kv.common_length(mine, theirs) == alike


def test_errors_of_attention_are_in_their_order() -> None:
    spec = dataclasses.replace(read_spec(embedded_model()), heads=4, kv_heads=2, head_dim=64)
    found = {figure.name: figure.value for figure in quantized_kv.attention_figures(spec)}
    assert len(found) == 2 * len(quantized_kv.KINDS)
    for part in ("", "_chunk"):
        plain, int8, fp8 = (
            found[f"attention_error_{name}{part}"] for name in ("bf16", "int8", "fp8_e4m3")
        )
        assert 0 < plain < 0.005 < int8 < 0.015 < fp8 < 0.05
