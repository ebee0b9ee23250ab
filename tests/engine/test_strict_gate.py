from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from baton.engine.cpu.strict_kernels import strict_gate
from baton.engine.spec.families import Activation

ACTIVATIONS = ("silu", "gelu_tanh")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_is_the_activation_times_the_other_half(activation: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    both = (torch.randn(33, 2 * 50) * 4).to(dtype)
    left, right = both.double().chunk(2, dim=-1)
    if activation == "silu":
        expected = functional.silu(left) * right
    else:
        expected = functional.gelu(left, approximate="tanh") * right
    found = strict_gate(both, activation)
    assert found.dtype == dtype
    exact = {torch.float32: 2e-6, torch.bfloat16: 5e-3}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=exact, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_row_does_not_depend_on_rows_or_threads(activation: Activation) -> None:
    """At sizes at which torch's own activation was seen to: 511 rows of 96, two threads."""
    torch.manual_seed(3)
    both = torch.randn(511, 2 * 96)
    whole = strict_gate(both, activation)
    for rows in (1, 2, 17, 333):
        assert torch.equal(strict_gate(both[:rows], activation), whole[:rows])
        assert torch.equal(strict_gate(both[-rows:], activation), whole[-rows:])
    torch.set_num_threads(2)
    try:
        assert torch.equal(strict_gate(both, activation), whole)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_finite_stays_so(activation: Activation) -> None:
    """So that a broken slice is found, and a very low number is not."""
    both = torch.tensor([[float("nan"), float("inf"), -3e38, 3e38, 1.0, 1.0, 1.0, 1.0]])
    nan, infinite, low, high = strict_gate(both, activation)[0].tolist()
    assert nan != nan and not abs(infinite) < float("inf")
    assert low == 0 and high > 2.9e38
