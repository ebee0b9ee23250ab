from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import baton.engine.cpu.linear as linear
from baton.engine.cpu.linear import CpuMatrix, padded_rows
from baton.runtime import process_memory

# It tells the memory that all numbers of rows take, once those to which they are filled up are met.
ROWS = """
import torch
from baton.engine.cpu.linear import CpuMatrix
from baton.runtime import process_memory

torch.set_num_threads(1)
matrix, x = CpuMatrix(torch.randn(176, 208)), torch.randn(128, 208)
for rows in range(72, 129, 8):
    matrix(x[:rows])
before = process_memory.allocated_bytes()
for rows in range(65, 129):
    assert matrix(x[:rows]).shape == (rows, 176)
print(process_memory.allocated_bytes() - before)
"""
FLOAT32_HALF_BIT, BFLOAT16_HALF_BIT = 2**-24, 2**-8


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=["compiled", "packed", "plain"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "compiled":
        monkeypatch.setattr(linear, "compiled_linear", lambda *_: None)
    if request.param == "plain":
        monkeypatch.setattr(linear, "torch_can_pack", lambda weight: False)


def product(weight, x, bias=None):
    """(the product in float64, the largest error that its arithmetic can have): sums in float32 in
    any order (Higham 2002, section 3.1), and the result rounded once to bfloat16."""
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    allowed = (x.shape[1] + 1) * FLOAT32_HALF_BIT * size
    if x.dtype == torch.bfloat16:
        allowed = allowed * (1 + BFLOAT16_HALF_BIT) + BFLOAT16_HALF_BIT * exact.abs()
    return exact, allowed


@pytest.mark.parametrize("rows", [1, 2, 5, 35, 64])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("outputs", [48, 64])
def test_product(packing: None, dtype: torch.dtype, rows: int, biased: bool, outputs: int) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(outputs, 32).to(dtype), torch.randn(rows, 32).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    exact, allowed = product(weight, x, bias)
    with torch.inference_mode():
        out = CpuMatrix(weight, bias)(x)
    assert out.dtype == dtype
    assert ((out.double() - exact).abs() <= allowed).all()


def test_few_numbers_of_rows_are_met_and_little_is_added() -> None:
    met = {rows: padded_rows(rows) for rows in range(1, 2049)}
    assert all(rows <= more < rows * 9 / 8 for rows, more in met.items())
    assert all(padded_rows(more) == more for more in met.values())
    assert len(set(met.values())) == 16 + 8 * 7


@pytest.mark.nightly
@pytest.mark.skipif(not process_memory.HEAP_IS_REPORTED, reason="needs glibc 2.33")
def test_a_new_number_of_rows_costs_no_memory(own_process: Callable[..., str]) -> None:
    """oneDNN keeps a kernel for each that it meets: half a MB, a thousand times."""
    if not linear.torch_can_pack(torch.zeros(176, 208)):
        pytest.skip("this machine does not pack")
    assert int(own_process(ROWS)) < 1 << 19


@pytest.mark.parametrize("outputs", [48, 64])
def test_a_row_among_others(packing: None, dtype: torch.dtype, outputs: int) -> None:
    weight, x = torch.randn(outputs, 256).to(dtype), torch.randn(40, 256).to(dtype)
    matrix = CpuMatrix(weight)
    exact, allowed = product(weight, x)
    assert ((matrix(x).double() - exact).abs() <= allowed).all()
    for row in (0, 17, 39):
        alone = matrix(x[row : row + 1])[0]
        assert ((alone.double() - exact[row]).abs() <= allowed[row]).all()


def test_the_bound_tells_a_mistake_from_rounding(dtype: torch.dtype) -> None:
    """One product of 32 left out nearly always shows; what is summed right never does."""
    torch.manual_seed(0)
    weight, x = torch.randn(48, 32).to(dtype), torch.randn(64, 32).to(dtype)
    exact, allowed = product(weight, x)
    less = exact - x[:, :1].double() * weight[:, 0].double()
    noticed = (less.to(dtype).double() - exact).abs() > allowed
    assert noticed.double().mean() > (0.999 if dtype == torch.float32 else 0.9)
    assert ((exact.float().to(dtype).double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("outputs", [16, 64])
def test_weight_may_change_afterwards_or_not_as_packed(dtype: torch.dtype, outputs: int) -> None:
    """A packed matrix is a copy: the loader's buffer may go."""
    weight = torch.randn(outputs, 16).to(dtype)
    if not linear.torch_can_pack(weight) and not linear.compiled_linear(weight, None, False):
        pytest.skip("this machine does not pack")
    matrix, x = CpuMatrix(weight), torch.randn(3, 16).to(dtype)
    before = matrix(x)
    weight.zero_()
    assert torch.equal(matrix(x), before)


def test_other_kinds_are_not_packed() -> None:
    for dtype in (torch.float64, torch.float16):
        assert not linear.torch_can_pack(torch.zeros(64, 4, dtype=dtype))
        assert linear.compiled_linear(torch.zeros(64, 4, dtype=dtype), None, False) is None


def test_without_the_operators_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear.torch.ops, "mkldnn", object())
    assert not linear.torch_can_pack(torch.zeros(4, 4))


def test_nothing_is_compiled_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_):
        raise AssertionError("a compiled product")

    monkeypatch.setattr(linear, "compiled_linear", refused)
    weight = torch.zeros(64, 4, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="a compiled product"):
        linear.CpuMatrices().plain(weight)
    assert linear.CpuMatrices(compiled=False).plain(weight)(weight[:2]).shape == (2, 64)
