"""One tile of the bfloat16 product, called from a Numba function as the kernels call it."""

import numba
import numpy as np
import pytest
import torch

from baton.engine.dot_bf16 import COLUMNS, MOST_ROWS, supported, tile

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX-512 BF16")
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
