from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import baton.engine.deterministic.linear_invariant as linear_invariant
from baton.engine.cpu.linear import CpuMatrix, torch_can_pack
from baton.engine.deterministic.linear_invariant import (
    InvariantLinear,
    RowTilings,
    with_invariant_linears,
)
from baton.engine.model import linear as model_linear
from baton.engine.model.linear import JoinedMatrix, PlainMatrix
from baton.runtime import process_memory
from baton.runtime.errors import ConfigError

# It tells the memory that all numbers of rows take, once they are measured.
ROWS = """
import torch
from baton.engine.cpu.linear import CpuMatrix
from baton.engine.deterministic.linear_invariant import InvariantLinear, RowTilings
from baton.runtime import process_memory

torch.set_num_threads(1)
linear = InvariantLinear(CpuMatrix(torch.randn(112, 144)), RowTilings())
x = torch.randn(576, 144)
linear(x)
before = process_memory.allocated_bytes()
for count in range(1, 577):
    linear(x[:count])
print(process_memory.allocated_bytes() - before)
"""


class Plain:
    """A product that sums in another order when `odd` says so of the number of rows."""

    def __init__(self, odd):
        self.weight = torch.randn(24, 160, generator=torch.Generator().manual_seed(1))
        self.odd = odd
        self.seen = set()

    def __call__(self, x):
        self.seen.add(len(x))
        out = (x[:, None] * self.weight).sum(-1) if not self.odd(len(x)) else None
        if out is None:
            halves = (x[:, None] * self.weight).flip(-1).cumsum(-1)
            out = halves[..., -1]
        return out


class Switching(Plain):
    """A product with two kernels, which agree in all that is measured."""

    switches_by_rows = True

    def __init__(self):
        super().__init__(lambda count: False)


def rows(count, inputs=160, dtype=torch.float32):
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(48, 256), (64, 160), (40, 3072)])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = InvariantLinear(CpuMatrix(torch.randn(shape).to(dtype)), RowTilings())
    x = rows(130, shape[1], dtype)
    whole = linear(x)
    assert whole.shape == (130, shape[0])
    for count in (1, 2, 6, 31, 47, 129):
        assert torch.equal(linear(x[:count]), whole[:count])
        assert torch.equal(linear(x[-count:]), whole[-count:])


def test_threads_change_no_row_of_an_ordinary_bfloat16_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """oneDNN on AMX splits such sums among threads, also of a fixed number of rows."""
    monkeypatch.setattr(linear_invariant, "_MAX_ROWS", 128)  # measured in a tenth of the time
    weight = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(5))
    matrix = CpuMatrix(weight.to(torch.bfloat16), batch_invariant=True)
    linear, x = InvariantLinear(matrix, RowTilings()), rows(128, 2048, torch.bfloat16)
    whole = linear(x)
    torch.set_num_threads(2)
    try:
        for count in (1, 33, 64, 128):
            assert torch.equal(linear(x[:count]), whole[:count])
    finally:
        torch.set_num_threads(1)


@pytest.mark.nightly
@pytest.mark.skipif(not process_memory.HEAP_IS_REPORTED, reason="needs glibc 2.33")
def test_no_row_count_costs_memory_after_the_measurement(own_process: Callable[..., str]) -> None:
    """A worker meets its last number of rows after hours: oneDNN would keep a kernel for it."""
    if not torch_can_pack(torch.zeros(112, 144)):
        pytest.skip("this machine does not pack")
    assert int(own_process(ROWS)) < 1 << 18


def test_a_matrix_that_keeps_rows_apart_gets_them_as_they_are() -> None:
    plain = Plain(lambda count: False)
    linear = InvariantLinear(plain, RowTilings())
    x = rows(3)
    assert torch.equal(linear(x), plain(x))
    plain.seen.clear()
    linear(x[:1])
    assert plain.seen == {1}


def test_one_row_that_takes_another_kernel_is_sent_in_company() -> None:
    plain = Plain(lambda count: count == 1)
    linear = InvariantLinear(plain, RowTilings())
    whole = linear(rows(9))
    plain.seen.clear()
    assert torch.equal(linear(rows(9)[:1]), whole[:1])
    assert plain.seen == {2}


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_matrix_with_many_kernels_gets_a_fixed_number_of_rows(count: int) -> None:
    plain = Plain(lambda count: count != 64)
    linear = InvariantLinear(plain, RowTilings())
    whole = linear(rows(200))
    plain.seen.clear()
    assert torch.equal(linear(rows(200)[:count]), whole[:count])
    assert plain.seen == {64}


@pytest.mark.parametrize("border", [1, 12, 32, 254, 512])
def test_another_kernel_for_any_number_of_rows_is_found(border: int) -> None:
    """Whether few rows take it, many, or one number alone of those that are measured."""
    for odd in (lambda n: n <= border, lambda n: n > border, lambda n: n == border + 1):
        plain = Plain(odd)
        linear = InvariantLinear(plain, RowTilings())
        whole = linear(rows(700))
        for count in (1, border, border + 1):
            assert torch.equal(linear(rows(700)[:count]), whole[:count])


@pytest.mark.parametrize(("large", "most"), [(1 << 24, 1024), (100, 256)])
def test_no_more_rows_at_once_than_were_measured(
    monkeypatch: pytest.MonkeyPatch, large: int, most: int
) -> None:
    monkeypatch.setattr(linear_invariant, "_LARGE_MATRIX", large)
    plain = Plain(lambda count: False)
    linear = InvariantLinear(plain, RowTilings())
    linear(rows(1))
    assert max(plain.seen) == most and {*range(1, 34), 255} <= plain.seen
    plain.seen.clear()
    x = rows(2 * most + 3)
    out = linear(x)
    assert plain.seen == {most, 3}
    torch.testing.assert_close(out, x @ plain.weight.T, rtol=0, atol=1e-4)


def test_a_matrix_whose_rows_cannot_be_kept_apart_is_refused() -> None:
    calls = []
    plain = Plain(lambda count: calls.append(count) or len(calls) % 2 == 0)
    with pytest.raises(ConfigError, match=r"worker\.deterministic: .* 160 inputs in float32"):
        InvariantLinear(plain, RowTilings())(rows(2))


def test_a_shape_is_measured_once() -> None:
    first, second = Plain(lambda count: count == 1), Plain(lambda count: count == 1)
    ways = RowTilings()
    InvariantLinear(first, ways)(rows(1))
    InvariantLinear(second, ways)(rows(1))
    assert len(first.seen) > 5
    assert second.seen <= {1, 2}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["plain first", "other first"])
def test_two_kinds_of_one_shape_are_measured_apart(order: tuple[int, int]) -> None:
    class Other(Plain):
        pass

    products = Plain(lambda count: False), Other(lambda count: count != 64)
    ways = RowTilings()
    linears = [InvariantLinear(product, ways) for product in products]
    for number in order:
        linears[number](rows(1))
        products[number].seen.clear()
        linears[number](rows(1))
    assert [product.seen for product in products] == [{1}, {64}]


def test_a_product_that_switches_gets_a_fixed_number_of_rows() -> None:
    """Also beside another in one matrix; nothing is measured."""
    for others in ((), (Plain(lambda count: False),)):
        product = Switching()
        matrix = JoinedMatrix([*others, product]) if others else product
        linear = InvariantLinear(matrix, RowTilings())
        for count in (1, 33, 65):
            assert torch.equal(linear(rows(65)[:count])[:, -24:], product(rows(65))[:count])
            assert product.seen <= {64, 65}
            product.seen.clear()


@pytest.mark.parametrize("fast", [False, True])
def test_a_slow_bfloat16_product_says_that_it_switches(
    monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """It is one kernel for two rows, and one in float32 for more."""
    monkeypatch.setattr(model_linear, "bfloat16_is_fast", lambda: fast)
    weight = torch.randn(24, 161)
    for dtype, switches in ((torch.bfloat16, not fast), (torch.float32, False)):
        linear = InvariantLinear(PlainMatrix(weight.to(dtype)), RowTilings())
        assert linear.switches_by_rows == switches


@dataclass(frozen=True, slots=True)
class Layer:
    norm: torch.Tensor
    product: object
    experts: tuple
    absent: None = None


def test_every_product_of_the_weights_and_no_other_is_wrapped() -> None:
    norm, inner = torch.ones(2), Plain(lambda count: False)
    layer = Layer(norm, inner, (inner, Layer(norm, inner, ())))
    wrapped = with_invariant_linears((layer, layer))[1]
    assert wrapped.norm is norm and wrapped.absent is None
    found = [wrapped.product, wrapped.experts[0], wrapped.experts[1].product]
    assert all(isinstance(product, InvariantLinear) for product in found)
    assert torch.equal(wrapped.product(rows(4)), inner(rows(4)))
