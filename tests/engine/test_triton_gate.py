"""The gate kernel's parity; its reference against torch's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from baton.engine.triton.gate import gated_reference
from tests.support.json_values import JsonObject


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_parity(product_checks: dict[str, JsonObject], activation: str, kind: str) -> None:
    found = product_checks[f"gated {activation} {kind}"]
    assert found["good"], found["said"]


def test_the_first_half_is_the_gate() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, 5.0]])
    assert torch.equal(gated_reference(x), functional.silu(x[:, :2]) * x[:, 2:])
    tanh = functional.gelu(x[:, :2], approximate="tanh") * x[:, 2:]
    assert torch.equal(gated_reference(x, "gelu_tanh"), tanh)
