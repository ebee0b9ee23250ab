"""The vectors of decode attention, each called from a Numba function on plain memory."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from baton.engine.cpu.decode_ir import fetch, narrow_mixed, scores_of_two
from baton.engine.cpu.dot_bf16 import supported
from baton.engine.cpu.softmax_ir import scores

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")


@numba.njit
def run_scores(query, keys, stride, vectors, out):
    scores(query, keys, stride, vectors, keys, out)


@numba.njit
def run_scores_of_two(query, query_stride, keys, stride, vectors, out, out_stride):
    scores_of_two(query, query_stride, keys, stride, vectors, keys, out, out_stride)


@pytest.mark.parametrize("dim", [32, 128])
def test_scores_of_two_are_those_of_each_bit_for_bit(dim: int) -> None:
    torch.manual_seed(dim)
    queries, keys = torch.randn(2, dim + 6).bfloat16(), torch.randn(16, dim + 8).bfloat16()
    out, each = torch.full((2, 20), 7.0), torch.zeros(2, 16)
    strides = 2 * (dim + 6), 2 * (dim + 8)
    at, to = queries.data_ptr(), out.data_ptr()
    run_scores_of_two(at, strides[0], keys.data_ptr(), strides[1], dim // 32, to, 80)
    for row in range(2):
        address = each[row].data_ptr()
        run_scores(at + row * strides[0], keys.data_ptr(), strides[1], dim // 32, address)
    assert torch.equal(out[:, :16], each) and (out[:, 16:] == 7).all()


@numba.njit
def run_scores_fetching(query, query_stride, keys, stride, vectors, ahead, out, out_stride):
    scores_of_two(query, query_stride, keys, stride, vectors, ahead, out, out_stride)


def test_the_tile_that_is_fetched_may_lie_nowhere() -> None:
    """The last job of all has no next tile, and a short sequence's is shorter than 16 tokens."""
    queries, keys = torch.randn(2, 128).bfloat16(), torch.randn(16, 128).bfloat16()
    found = []
    for ahead in (keys.data_ptr(), 0):
        out = torch.zeros(2, 16)
        at = queries.data_ptr(), 256, keys.data_ptr(), 256, 4
        run_scores_fetching(*at, ahead, out.data_ptr(), 64)
        found.append(out)
    assert found[0].any() and torch.equal(*found)


@numba.njit
def run_fetch(at):
    fetch(at)


def test_a_line_may_be_asked_for_that_lies_nowhere() -> None:
    keys = torch.randn(64)
    before = keys.clone()
    for at in (keys.data_ptr(), 0, -64, 1 << 60):
        run_fetch(at)
    assert torch.equal(keys, before)


@numba.njit
def run_narrow_mixed(at, out, parts, factor):
    narrow_mixed(at, out, parts, factor)


def test_narrow_mixed_puts_numbers_in_their_order() -> None:
    values, out = torch.randn(2, 2, 16), torch.full((72,), 7.0).bfloat16()
    run_narrow_mixed(values.data_ptr(), out.data_ptr(), 2, np.float32(0.5))
    expected = (values * 0.5).transpose(1, 2).reshape(64).bfloat16()  # even indices, then odd
    assert torch.equal(out[:64], expected) and (out[64:] == 7).all()
