"""The grouped product's parity, and the sorting that it needs."""

from __future__ import annotations

import pytest
import torch

from baton.engine.triton.experts import expert_matmul_reference, sort_by_expert
from tests.support.json_values import JsonObject


@pytest.mark.parametrize(
    "name", ["fp32 gathered, few rows", "bf16 gathered, few rows", "bf16 sorted, many rows"]
)
def test_parity(product_checks: dict[str, JsonObject], name: str) -> None:
    found = product_checks[f"expert_matmul {name}"]
    assert found["good"], found["said"]


def test_sorting_keeps_the_order_within_an_expert() -> None:
    chosen = torch.tensor([[3, 0], [0, 1], [3, 1]])
    order, offsets = sort_by_expert(chosen, 5)
    assert order.tolist() == [1, 2, 3, 5, 0, 4]
    assert offsets.tolist() == [0, 2, 4, 4, 6, 6]
    assert offsets.dtype == torch.int32


def test_each_row_meets_the_matrix_of_its_expert() -> None:
    torch.manual_seed(0)
    chosen = torch.randint(0, 4, (7, 2))
    x, weights = torch.randn(7, 6), torch.randn(4, 3, 6)
    order, offsets = sort_by_expert(chosen, 4)
    out = expert_matmul_reference(x, weights, offsets, order // 2)
    for row, source in enumerate(order.tolist()):
        wanted = weights[chosen.flatten()[source]] @ x[source // 2]
        torch.testing.assert_close(out[row], wanted)
