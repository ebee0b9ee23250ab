import pytest
import torch

import baton.engine.linear as linear
from baton.engine.linear import Matrix

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(params=["compiled", "packed", "plain"])
def packing(request, monkeypatch):
    if request.param != "compiled":
        monkeypatch.setattr(linear, "_compiled", lambda weight, bias: None)
    if request.param == "plain":
        monkeypatch.setattr(linear, "_can_pack", lambda weight: False)


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("outputs", [48, 64])
def test_product(packing, dtype, rows, biased, outputs):
    torch.manual_seed(rows)
    weight, x = torch.randn(outputs, 32).to(dtype), torch.randn(rows, 32).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    with torch.inference_mode():
        out = Matrix(weight, bias)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("outputs", [48, 64])
def test_a_row_among_others(packing, dtype, outputs):
    weight, x = torch.randn(outputs, 256).to(dtype), torch.randn(40, 256).to(dtype)
    matrix = Matrix(weight)
    together = matrix(x)
    for row in (0, 17, 39):
        alone = matrix(x[row : row + 1])
        torch.testing.assert_close(
            alone[0], together[row], rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=1e-4
        )


@pytest.mark.parametrize("outputs", [16, 64])
def test_weight_may_change_afterwards_or_not_as_packed(dtype, outputs):
    """A packed matrix is a copy: the loader's buffer may go."""
    weight = torch.randn(outputs, 16).to(dtype)
    if not linear._can_pack(weight) and not linear._compiled(weight, None):
        pytest.skip("this machine does not pack")
    matrix, x = Matrix(weight), torch.randn(3, 16).to(dtype)
    before = matrix(x)
    weight.zero_()
    assert torch.equal(matrix(x), before)


def test_other_kinds_are_not_packed():
    for dtype in (torch.float64, torch.float16):
        assert not linear._can_pack(torch.zeros(64, 4, dtype=dtype))
        assert linear._compiled(torch.zeros(64, 4, dtype=dtype), None) is None


def test_without_the_operators_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(linear.torch.ops, "mkldnn", object())
    assert not linear._can_pack(torch.zeros(4, 4))


def test_without_numba_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(linear, "find_spec", lambda name: None)
    assert linear._compiled(torch.zeros(64, 4, dtype=torch.bfloat16), None) is None
