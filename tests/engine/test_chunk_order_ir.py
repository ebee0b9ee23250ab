"""The emitted vectors against the same sums one by one, in float32 and in their order."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from baton.engine.cpu.chunk_order_ir import MAX_QUERIES, finish, mix_in_order, scores_in_order
from baton.engine.cpu.dot_bf16 import supported
from baton.engine.cpu.tile_bf16 import MAX_ROWS, tile

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
QUERIES = range(1, MAX_QUERIES + 1)
_tile = tile(1, wide=True)


@numba.njit
def _scores(queries, query, keys, vectors, out, ahead=0):
    scores_in_order(queries, query, vectors * 64, keys, vectors * 64, vectors, ahead, out, 64)


@numba.njit
def _mixed(queries, weights, values, tokens, nothing, sums, out, ahead=0):
    mix_in_order(queries, weights, 32, values, 128, tokens, nothing, ahead, sums, 256)
    for query in range(queries):
        finish(sums + 256 * query, out + 128 * query)


@numba.njit
def _product(rows, x, x_stride, panel, pairs, start, out):
    _tile(rows, x, x_stride, panel, panel, pairs, start, out, 256)


def in_order(left, right):
    """float32 [rows, 64] of bfloat16 `left` [rows, 2 n] and `right` [2 n, 64], by the kernel of
    products, whose order is what is promised."""
    panel = right.view(-1, 2, 64).transpose(1, 2).contiguous()
    out, start = torch.full((len(left), 64), torch.nan), torch.zeros(64)
    panel_at, start_at = panel.data_ptr(), start.data_ptr()
    for x, to in zip(left.split(MAX_ROWS), out.split(MAX_ROWS), strict=True):
        rows_at = x.data_ptr(), 2 * x.stride(0)
        _product(len(x), *rows_at, panel_at, len(right) // 2, start_at, to.data_ptr())
    return out


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("vectors", [1, 2, 4])
def test_scores_are_those_of_a_packed_product(queries: int, vectors: int) -> None:
    torch.manual_seed(queries)
    query, keys = torch.randn(queries, 32 * vectors), torch.randn(16, 32 * vectors)
    query, keys = query.bfloat16(), keys.bfloat16()
    out = torch.full((queries, 16), torch.nan)
    _scores(queries, query.data_ptr(), keys.data_ptr(), vectors, out.data_ptr())
    padded = torch.zeros(64, 32 * vectors).bfloat16()
    padded[:16] = keys
    assert torch.equal(out, in_order(query, padded.T.contiguous())[:, :16])
    exact = query.double() @ keys.double().T
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 15, 16])
def test_mixed_values_are_those_of_a_packed_product(queries: int, tokens: int) -> None:
    """What follows the last token is not read as a number."""
    torch.manual_seed(tokens)
    weights = torch.zeros(queries, 16).bfloat16()
    weights[:, :tokens] = torch.rand(queries, tokens)
    values = torch.full((16, 64), torch.nan).bfloat16()
    values[:tokens] = torch.randn(tokens, 64)
    nothing, sums = torch.zeros(64).bfloat16(), torch.zeros(queries, 64)
    out = torch.full((queries, 64), torch.nan).bfloat16()
    pointers = (tensor.data_ptr() for tensor in (weights, values, nothing, sums, out))
    weights_at, values_at, nothing_at, sums_at, out_at = pointers
    _mixed(queries, weights_at, values_at, tokens, nothing_at, sums_at, out_at)
    expected = in_order(weights, values.nan_to_num(0.0))
    assert torch.equal(out, expected.bfloat16())
    exact = weights.double() @ values.nan_to_num(0.0).double()
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("queries", QUERIES)
def test_what_is_fetched_changes_no_bit_and_may_lie_nowhere(queries: int) -> None:
    torch.manual_seed(queries)
    rows, tile = torch.randn(queries, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    weights, nothing = torch.rand(queries, 16).bfloat16(), torch.zeros(64).bfloat16()
    scored, mixed = [], []
    for ahead in (0, tile.data_ptr(), -1 << 62):
        out, sums = torch.zeros(queries, 16), torch.zeros(queries, 64)
        _scores(queries, rows.data_ptr(), tile.data_ptr(), 2, out.data_ptr(), ahead)
        scored.append(out)
        out = torch.zeros(queries, 64).bfloat16()
        given = weights.data_ptr(), tile.data_ptr(), 16, nothing.data_ptr()
        _mixed(queries, *given, sums.data_ptr(), out.data_ptr(), ahead)
        mixed.append(out)
    for found in (scored, mixed):
        assert found[0].any() and all(torch.equal(found[0], each) for each in found)


def test_sums_go_on_from_tile_to_tile() -> None:
    torch.manual_seed(0)
    weights, values = torch.rand(2, 32).bfloat16(), torch.randn(32, 64).bfloat16()
    nothing, sums = torch.zeros(64).bfloat16(), torch.zeros(2, 64)
    out = torch.empty(2, 64).bfloat16()
    for first in (0, 16):
        part = weights[:, first : first + 16].contiguous()
        at = values[first:].data_ptr()
        pointers = nothing.data_ptr(), sums.data_ptr(), out.data_ptr()
        _mixed(2, part.data_ptr(), at, 16, *pointers)
    assert torch.equal(out, in_order(weights, values).bfloat16())
    assert np.isfinite(sums.numpy()).all()
