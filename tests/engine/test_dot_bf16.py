"""One tile of the bfloat16 product, called from a Numba function as the kernels call it."""

import numba
import numpy as np
import pytest
import torch
from numba.core import types
from numba.extending import intrinsic

from baton.engine import dot_bf16
from baton.engine.dot_bf16 import COLUMNS, LANES, MOST_ROWS, supported, tile

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
PAIRS = 5
_tile = tile(1)


@numba.njit
def run(rows, x, x_stride, panel, ahead, pairs, start, out, out_stride):
    _tile(rows, x, x_stride, panel, ahead, pairs, start, out, out_stride)


_none, _all = tile(0), tile(4)


@numba.njit
def run_fetching(lines, rows, x, x_stride, panel, ahead, pairs, start, out, out_stride):
    if lines:
        _all(rows, x, x_stride, panel, ahead, pairs, start, out, out_stride)
    else:
        _none(rows, x, x_stride, panel, ahead, pairs, start, out, out_stride)


@pytest.mark.parametrize("rows", [1, MOST_ROWS])
def test_what_is_fetched_changes_no_bit_and_may_lie_nowhere(rows):
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * PAIRS).to(torch.bfloat16)
    panel = torch.randn(PAIRS, COLUMNS, 2).to(torch.bfloat16)
    start, found = torch.randn(COLUMNS), []
    for lines, ahead in ((0, 0), (4, 0), (4, panel.data_ptr())):
        out = torch.zeros(rows, COLUMNS, dtype=torch.bfloat16)
        at = x.data_ptr(), 4 * PAIRS, panel.data_ptr(), ahead, PAIRS
        run_fetching(lines, rows, *at, start.data_ptr(), out.data_ptr(), 2 * COLUMNS)
        found.append(out)
    assert found[0].any() and all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
def test_rows_are_multiplied_and_nothing_else_is_touched(rows):
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * PAIRS + 4).to(torch.bfloat16)  # the last four are not inputs
    weight = torch.randn(COLUMNS, 2 * PAIRS).to(torch.bfloat16)
    panel = weight.view(COLUMNS, PAIRS, 2).transpose(0, 1).contiguous()
    start = torch.randn(COLUMNS)
    out = torch.full((MOST_ROWS + 1, COLUMNS + 8), 7.0).to(torch.bfloat16)
    run(
        rows,
        x.data_ptr(),
        2 * x.stride(0),
        panel.data_ptr(),
        panel.data_ptr(),
        PAIRS,
        start.data_ptr(),
        out.data_ptr(),
        2 * out.stride(0),
    )
    exact = x[:, : 2 * PAIRS].double() @ weight.double().T + start.double()
    torch.testing.assert_close(out[:rows, :COLUMNS].double(), exact, rtol=2**-8, atol=1e-5)
    assert (out[rows:] == 7.0).all() and (out[:, COLUMNS:] == 7.0).all()


def test_an_unknown_number_of_rows_does_nothing():
    memory = np.full(4096, 3, dtype=np.int8)
    at = memory.ctypes.data
    run(MOST_ROWS + 1, at, 0, at, at, 1, at, at, 0)
    assert (memory == 3).all()


@pytest.mark.skipif(not dot_bf16.native(), reason="this processor has but one way")
@pytest.mark.parametrize("rows", range(1, 5))
def test_without_the_instruction_it_computes_the_same(monkeypatch, rows):
    """Float32 products, as a processor with AVX2 alone makes them."""
    monkeypatch.setattr(dot_bf16, "native", lambda: False)
    plain = tile(0)

    @numba.njit
    def run_plain(rows, x, x_stride, panel, ahead, pairs, start, out, out_stride):
        plain(rows, x, x_stride, panel, ahead, pairs, start, out, out_stride)

    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * PAIRS).to(torch.bfloat16)
    panel, start = torch.randn(PAIRS, COLUMNS, 2).to(torch.bfloat16), torch.randn(COLUMNS)
    found = []
    for function in (run, run_plain):
        out = torch.zeros(rows, COLUMNS, dtype=torch.bfloat16)
        at = x.data_ptr(), 4 * PAIRS, panel.data_ptr(), panel.data_ptr(), PAIRS
        function(rows, *at, start.data_ptr(), out.data_ptr(), 2 * COLUMNS)
        found.append(out)
    torch.testing.assert_close(*found, rtol=2**-7, atol=1e-5)  # one step of a bfloat16


@intrinsic
def narrow(_typing, source, target):
    def generate(context, builder, _signature, values):
        value = dot_bf16.load(builder, values[0], 0, dot_bf16.FLOATS)
        dot_bf16.store(builder, dot_bf16.narrowed(builder, value), values[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def widen(_typing, source, target):
    def generate(context, builder, _signature, values):
        value = dot_bf16.load(builder, values[0], 0, dot_bf16.BFLOATS)
        dot_bf16.store(builder, dot_bf16.widened(builder, value), values[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


ODD = [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 3.4e38, -3.4e38, 1e-45]
TIES = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 1 - 2**-9, 2.5, -7.0, 1e-38]


@pytest.mark.parametrize("has_instruction", [True, False])
def test_numbers_are_rounded_as_torch_rounds_them(monkeypatch, has_instruction):
    if has_instruction and not dot_bf16.native():
        pytest.skip("this processor has but one way")
    monkeypatch.setattr(dot_bf16, "native", lambda: has_instruction)

    @numba.njit
    def there_and_back(source, target, back):
        narrow(source, target)
        widen(target, back)

    values = torch.tensor(ODD + TIES)
    assert len(values) == LANES
    if has_instruction:  # it may take the smallest numbers for nought
        values[values.abs() < 1.2e-38] = 0.0
    found, back = torch.zeros(LANES, dtype=torch.bfloat16), torch.zeros(LANES)
    there_and_back(values.data_ptr(), found.data_ptr(), back.data_ptr())
    exact = values.to(torch.bfloat16)
    assert torch.equal(found.nan_to_num(9.0), exact.nan_to_num(9.0))
    assert torch.equal(back.nan_to_num(9.0), exact.to(torch.float32).nan_to_num(9.0))
    assert found.isnan().equal(values.isnan()) and back.isnan().equal(values.isnan())
