"""The vector functions of attention, each called from a Numba function on plain memory."""

import numba
import numpy as np
import pytest
import torch

from baton.engine.dot_bf16 import supported
from baton.engine.softmax_ir import copy, exponentials, highest, mix, narrow, scores, widen

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX-512 BF16")
_mix_two = mix(2)


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


@pytest.mark.parametrize("dim", [32, 64, 96])
def test_scores(dim):
    torch.manual_seed(dim)
    query, keys = torch.randn(dim).bfloat16(), torch.randn(16, dim + 8).bfloat16()
    out = torch.zeros(16)
    run_scores(query.data_ptr(), keys.data_ptr(), 2 * (dim + 8), dim // 32, out.data_ptr())
    expected = keys[:, :dim].double() @ query.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [16, 48])
def test_highest(count):
    values = torch.randn(count)
    assert run_highest(values.data_ptr(), count // 16) == values.max()
    values[5] = torch.inf
    assert run_highest(values.data_ptr(), count // 16) == torch.inf


def test_exponentials():
    values = torch.cat((torch.linspace(-60, 3, 62), torch.tensor([-torch.inf, -1e30])))
    expected = ((values.double() - 3) * 0.7).exp()
    total = run_exponentials(values.data_ptr(), 4, np.float32(3.0), np.float32(0.7))
    torch.testing.assert_close(values.double(), expected, rtol=5e-6, atol=0)
    assert values[62] == 0 and values[63] == 0
    assert total == pytest.approx(expected.sum().item(), rel=1e-6)


def test_exponentials_of_nothing_known():
    values = torch.full((16,), torch.nan)
    total = run_exponentials(values.data_ptr(), 1, np.float32(0.0), np.float32(1.0))
    assert values.isnan().all() and np.isnan(total)


def test_narrow_rounds_as_torch_does():
    values, out = torch.randn(64), torch.zeros(80).bfloat16()
    run_narrow(values.data_ptr(), out.data_ptr(), 4, np.float32(1.5))
    assert torch.equal(out[:64], (values * 1.5).bfloat16())
    assert (out[64:] == 0).all()


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_mix(tokens):
    torch.manual_seed(tokens)
    weights, values = torch.randn(2, 20), torch.randn(tokens, 70).bfloat16()
    out = torch.ones(2, 64)
    run_mix(weights.data_ptr(), 80, values.data_ptr(), 140, tokens, out.data_ptr(), 256)
    mixed = 1 + weights[:, :tokens].double() @ values[:, :64].double()
    ordered = mixed.view(2, 2, 16, 2).transpose(2, 3).reshape(2, 64)  # even places, then odd
    torch.testing.assert_close(out.double(), ordered, rtol=1e-5, atol=1e-5)


@numba.njit
def run_widen(at, out, vectors):
    widen(at, out, vectors)


@numba.njit
def run_copy(at, out, vectors):
    copy(at, out, vectors)


def test_widen_and_copy_keep_every_number():
    values = torch.tensor([0.0, -0.0, 1.5, torch.inf, -torch.inf, 1e-40] + [3.0] * 26).bfloat16()
    wide, again = torch.full((40,), 7.0), torch.full((40,), 7.0)
    run_widen(values.data_ptr(), wide.data_ptr(), 2)
    run_copy(wide.data_ptr(), again.data_ptr(), 2)
    assert torch.equal(wide[:32], values.float())
    assert torch.equal(again[:32], values.float())
    assert (wide[32:] == 7).all() and (again[32:] == 7).all()


@pytest.mark.parametrize("power", [100.0, 200.0, torch.inf])
def test_a_large_exponential_ends_at_a_large_number(power):
    values = torch.full((16,), power)
    run_exponentials(values.data_ptr(), 1, np.float32(0.0), np.float32(1.0))
    assert values.isfinite().all() and (values >= 2.0**126).all()
