"""The vector functions of attention, each called from a Numba function on plain memory."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch

from baton.engine.cpu.dot_bf16 import supported
from baton.engine.cpu.softmax_ir import (
    code_scores,
    exponentials,
    highest,
    mix,
    narrow,
    scores,
)
from baton.engine.memory.kv_quant import FP8_E4M3, INT8, KvQuant

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
_mix_two = mix(2)
_one_int8, _two_fp8 = code_scores(1, "int8"), code_scores(2, "fp8")
_mix_one_fp8, _mix_two_int8 = mix(1, "fp8"), mix(2, "int8")


@numba.njit
def run_scores(query, keys, stride, vectors, out):
    scores(query, keys, stride, vectors, keys, out)


@numba.njit
def run_highest(at, vectors):
    return highest(at, vectors)


@numba.njit
def run_exponentials(at, vectors, best, scale):
    return exponentials(at, vectors, best, scale)


@numba.njit
def run_narrow(at, out, vectors, factor):
    narrow(at, out, vectors, factor)


@numba.njit
def run_mix(weights, weights_stride, values, stride, tokens, out, out_stride):
    _mix_two(weights, weights_stride, values, stride, tokens, 0, out, out_stride)


@numba.njit
def run_one_int8(query, query_stride, keys, stride, vectors, out, out_stride):
    _one_int8(query, query_stride, keys, stride, vectors, keys, out, out_stride)


@numba.njit
def run_two_fp8(query, query_stride, keys, stride, vectors, out, out_stride):
    _two_fp8(query, query_stride, keys, stride, vectors, 0, out, out_stride)


@numba.njit
def run_mix_codes(weights, weights_stride, values, stride, tokens, out, out_stride, two):
    if two:
        _mix_two_int8(weights, weights_stride, values, stride, tokens, 0, out, out_stride)
    else:
        _mix_one_fp8(weights, weights_stride, values, stride, tokens, 0, out, out_stride)


@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize(
    ("codes", "run", "queries"), [(INT8, run_one_int8, 1), (FP8_E4M3, run_two_fp8, 2)]
)
def test_scores_of_codes(codes: KvQuant, run: Callable[..., None], queries: int, dim: int) -> None:
    torch.manual_seed(dim)
    stride = dim + 8
    query = torch.randn(queries, stride).bfloat16()
    keys, _ = codes.encode(torch.randn(16, stride))
    out = torch.zeros(queries, 20)
    run(query.data_ptr(), 2 * stride, keys.data_ptr(), stride, dim // 32, out.data_ptr(), 80)
    expected = query[:, :dim].double() @ keys[:, :dim].double().T
    expected /= 1 if codes is INT8 else 256
    torch.testing.assert_close(out[:, :16].double(), expected, rtol=1e-5, atol=1e-4)
    assert not out[:, 16:].any()


@pytest.mark.parametrize(("codes", "queries"), [(FP8_E4M3, 1), (INT8, 2)])
@pytest.mark.parametrize("tokens", [1, 16])
def test_mix_of_codes(codes: KvQuant, queries: int, tokens: int) -> None:
    weights, start = torch.rand(queries, 24), torch.randn(queries, 64)
    values, _ = codes.encode(torch.randn(tokens, 72))
    out = start.clone()
    given = (weights.data_ptr(), 96, values.data_ptr(), 72, tokens, out.data_ptr(), 256)
    run_mix_codes(*given, queries == 2)
    mixed = weights[:, :tokens].double() @ values[:, :64].double()
    expected = start.double() + mixed / (1 if codes is INT8 else 256)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_every_code_counts_as_its_number() -> None:
    """All numbers of either kind, as keys against a query that picks one position."""
    for codes, run, queries in ((INT8, run_one_int8, 1), (FP8_E4M3, run_two_fp8, 2)):
        numbers = torch.arange(256, dtype=torch.uint8).view(16, 16)
        keys = torch.zeros(16, 32, dtype=torch.uint8)
        for index in range(16):
            keys[:, 5] = numbers[:, index]
            query, out = torch.zeros(queries, 32), torch.zeros(queries, 16)
            query[:, 5] = 1.0
            bits = query.bfloat16()
            run(bits.data_ptr(), 64, keys.data_ptr(), 32, 1, out.data_ptr(), 64)
            expected = keys[:, 5].clone().view(codes.dtype).float()
            expected /= 1 if codes is INT8 else 256
            there = ~expected.isnan()
            assert torch.equal(out[0, there], expected[there])


@pytest.mark.parametrize("dim", [32, 64, 96])
def test_scores(dim: int) -> None:
    torch.manual_seed(dim)
    query, keys = torch.randn(dim).bfloat16(), torch.randn(16, dim + 8).bfloat16()
    out = torch.zeros(16)
    run_scores(query.data_ptr(), keys.data_ptr(), 2 * (dim + 8), dim // 32, out.data_ptr())
    expected = keys[:, :dim].double() @ query.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [16, 48])
def test_highest(count: int) -> None:
    values = torch.randn(count)
    assert run_highest(values.data_ptr(), count // 16) == values.max()
    values[5] = torch.inf
    assert run_highest(values.data_ptr(), count // 16) == torch.inf


def test_exponentials() -> None:
    values = torch.cat((torch.linspace(-60, 3, 62), torch.tensor([-torch.inf, -1e30])))
    expected = ((values.double() - 3) * 0.7).exp()
    total = run_exponentials(values.data_ptr(), 4, np.float32(3.0), np.float32(0.7))
    torch.testing.assert_close(values.double(), expected, rtol=5e-6, atol=0)
    assert values[62] == 0 and values[63] == 0
    assert total == pytest.approx(expected.sum().item(), rel=1e-6)


def test_exponentials_of_nothing_known() -> None:
    values = torch.full((16,), torch.nan)
    total = run_exponentials(values.data_ptr(), 1, np.float32(0.0), np.float32(1.0))
    assert values.isnan().all() and np.isnan(total)


def test_narrow_rounds_as_torch_does() -> None:
    values, out = torch.randn(64), torch.zeros(80).bfloat16()
    run_narrow(values.data_ptr(), out.data_ptr(), 4, np.float32(1.5))
    assert torch.equal(out[:64], (values * 1.5).bfloat16())
    assert (out[64:] == 0).all()


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_mix(tokens: int) -> None:
    torch.manual_seed(tokens)
    weights, values = torch.randn(2, 20), torch.randn(tokens, 70).bfloat16()
    out = torch.ones(2, 64)
    run_mix(weights.data_ptr(), 80, values.data_ptr(), 140, tokens, out.data_ptr(), 256)
    mixed = 1 + weights[:, :tokens].double() @ values[:, :64].double()
    ordered = mixed.view(2, 2, 16, 2).transpose(2, 3).reshape(2, 64)  # even, then odd
    torch.testing.assert_close(out.double(), ordered, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("power", [100.0, 200.0, torch.inf])
def test_a_large_exponential_ends_at_a_large_number(power: float) -> None:
    values = torch.full((16,), power)
    run_exponentials(values.data_ptr(), 1, np.float32(0.0), np.float32(1.0))
    assert values.isfinite().all() and (values >= 2.0**126).all()


def test_what_is_not_a_number_stays_in_its_lane() -> None:
    values = torch.linspace(-3, 2, 32)
    expected = values.double().exp()
    values[[3, 20]] = expected[[3, 20]] = torch.nan
    run_exponentials(values.data_ptr(), 2, np.float32(0.0), np.float32(1.0))
    torch.testing.assert_close(values.double(), expected, rtol=5e-6, atol=0, equal_nan=True)
