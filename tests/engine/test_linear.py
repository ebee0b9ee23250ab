import pytest
import torch

import baton.engine.linear as linear
from baton.engine.linear import Matrix

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packing(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(linear, "_can_pack", lambda weight: False)


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("biased", [True, False])
def test_product(packing, dtype, rows, biased):
    torch.manual_seed(rows)
    weight, x = torch.randn(48, 32).to(dtype), torch.randn(rows, 32).to(dtype)
    bias = torch.randn(48).to(dtype) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    with torch.inference_mode():
        out = Matrix(weight, bias)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_a_row_among_others(packing, dtype):
    weight, x = torch.randn(48, 256).to(dtype), torch.randn(40, 256).to(dtype)
    matrix = Matrix(weight)
    together = matrix(x)
    for row in (0, 17, 39):
        alone = matrix(x[row : row + 1])
        torch.testing.assert_close(
            alone[0], together[row], rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=1e-4
        )


def test_weight_may_change_afterwards_or_not_as_packed(dtype):
    """A packed matrix is a copy: the loader's buffer may go."""
    weight = torch.randn(16, 16).to(dtype)
    if not linear._can_pack(weight):
        pytest.skip("this machine does not pack")
    matrix, x = Matrix(weight), torch.randn(3, 16).to(dtype)
    before = matrix(x)
    weight.zero_()
    assert torch.equal(matrix(x), before)


def test_other_kinds_are_not_packed():
    assert not linear._can_pack(torch.zeros(4, 4, dtype=torch.float64))
    assert not linear._can_pack(torch.zeros(4, 4, dtype=torch.float16))


def test_without_the_operators_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(linear.torch.ops, "mkldnn", object())
    assert not linear._can_pack(torch.zeros(4, 4))
