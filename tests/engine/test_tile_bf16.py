"""One tile of the bfloat16 product, called from a Numba function as the kernels call it."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from baton.engine.cpu import dot_bf16, tile_bf16
from baton.engine.cpu.dot_bf16 import COLUMNS, supported
from baton.engine.cpu.tile_bf16 import MAX_ROWS, tile

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
STRETCH = tile_bf16.STRETCH_PAIRS
ROWS = range(1, MAX_ROWS + 1)
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


@pytest.mark.parametrize("rows", [1, MAX_ROWS])
def test_what_is_fetched_changes_no_bit_and_may_lie_nowhere(rows: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 10).to(torch.bfloat16)
    panel = torch.randn(5, COLUMNS, 2).to(torch.bfloat16)
    start, found = torch.randn(COLUMNS), []
    for lines, ahead in ((0, 0), (4, 0), (4, panel.data_ptr())):
        out = torch.zeros(rows, COLUMNS, dtype=torch.bfloat16)
        at = x.data_ptr(), 20, panel.data_ptr(), ahead, 5
        run_fetching(lines, rows, *at, start.data_ptr(), out.data_ptr(), 2 * COLUMNS)
        found.append(out)
    assert found[0].any() and all(torch.equal(found[0], each) for each in found)


def product(function, x, weight, start):
    """`out` of MAX_ROWS + 1 rows and 8 more columns, filled with 7 before."""
    rows, pairs = x.shape[0], weight.shape[1] // 2
    panel = weight.view(COLUMNS, pairs, 2).transpose(0, 1).contiguous()
    out = torch.full((MAX_ROWS + 1, COLUMNS + 8), 7.0).to(torch.bfloat16)
    panel_at, stride = panel.data_ptr(), 2 * x.stride(0)
    to = out.data_ptr(), 2 * out.stride(0)
    function(rows, x.data_ptr(), stride, panel_at, panel_at, pairs, start.data_ptr(), *to)
    return out


# a stretch and more, and what is left over of one or of a vector
@pytest.mark.parametrize("pairs", [1, 5, 8, STRETCH - 1, STRETCH, STRETCH + 1, 2 * STRETCH + 13])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_are_multiplied_and_nothing_else_is_touched(rows: int, pairs: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * pairs + 4).to(torch.bfloat16)  # the last four are not inputs
    weight = torch.randn(COLUMNS, 2 * pairs).to(torch.bfloat16)
    start = torch.randn(COLUMNS)
    out = product(run, x, weight, start)
    exact = x[:, : 2 * pairs].double() @ weight.double().T + start.double()
    torch.testing.assert_close(out[:rows, :COLUMNS].double(), exact, rtol=2**-8, atol=1e-3)
    assert (out[rows:] == 7.0).all() and (out[:, COLUMNS:] == 7.0).all()


@pytest.mark.parametrize("pairs", [5, 2 * STRETCH + 13])
def test_a_row_is_the_same_bits_whatever_stands_beside_it(pairs: int) -> None:
    torch.manual_seed(pairs)
    x = torch.randn(MAX_ROWS, 2 * pairs).to(torch.bfloat16)
    weight, start = torch.randn(COLUMNS, 2 * pairs).to(torch.bfloat16), torch.randn(COLUMNS)
    alone = [product(run, row[None], weight, start)[0] for row in x]
    for rows in ROWS:
        assert torch.equal(product(run, x[:rows], weight, start)[:rows], torch.stack(alone[:rows]))


def test_nothing_behind_the_last_number_counts() -> None:
    """It would make the sums NaN."""
    x = torch.full((MAX_ROWS, 26), torch.nan).to(torch.bfloat16)
    x[:, :18] = 1.0
    out = product(run, x, torch.ones(COLUMNS, 18).to(torch.bfloat16), torch.zeros(COLUMNS))
    assert (out[:MAX_ROWS, :COLUMNS] == 18.0).all()


def test_an_unknown_number_of_rows_does_nothing() -> None:
    memory = np.full(4096, 3, dtype=np.int8)
    at = memory.ctypes.data
    run(MAX_ROWS + 1, at, 0, at, at, 1, at, at, 0)
    assert (memory == 3).all()


@pytest.mark.skipif(not dot_bf16.native(), reason="this processor has but one way")
@pytest.mark.parametrize("pairs", [5, STRETCH + 9])
@pytest.mark.parametrize("rows", ROWS)
def test_without_the_instruction_it_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, rows: int, pairs: int
) -> None:
    """Float32 products, as a processor with AVX2 alone makes them."""
    for module in (dot_bf16, tile_bf16):
        monkeypatch.setattr(module, "native", lambda: False)
    plain = tile(0)

    @numba.njit
    def run_plain(rows, x, x_stride, panel, ahead, pairs, start, out, out_stride):
        plain(rows, x, x_stride, panel, ahead, pairs, start, out, out_stride)

    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * pairs).to(torch.bfloat16)
    weight, start = torch.randn(COLUMNS, 2 * pairs).to(torch.bfloat16), torch.randn(COLUMNS)
    found = [product(function, x, weight, start) for function in (run, run_plain)]
    torch.testing.assert_close(*found, rtol=2**-7, atol=1e-3)  # one step of a bfloat16
