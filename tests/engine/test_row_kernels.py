"""The compiled norms and gates, against float64 and against torch's own."""

from __future__ import annotations

import pytest
import torch

import baton.engine.cpu.row_kernels as row_kernels
from baton.engine.cpu.dot_bf16 import supported
from baton.engine.cpu.row_kernels import NumbaNorms, silu_gate, warm_up
from baton.engine.model.row_ops import TorchNorms, torch_gating

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
EPS = 1e-6
HALF_BIT = 2**-8  # of a bfloat16, relative


@pytest.fixture(params=["alone", "shared"])
def norms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NumbaNorms:
    """Both ways of each function: in the caller's thread, and shared among threads."""
    torch.manual_seed(3)
    least = 1 if request.param == "shared" else 1 << 40
    monkeypatch.setattr(row_kernels, "_SHARED_NUMBERS", least)
    return NumbaNorms()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that goes to torch is an error."""

    def fail(*arguments):
        raise AssertionError("went to torch")

    monkeypatch.setattr(TorchNorms, "norm", fail)
    monkeypatch.setattr(TorchNorms, "add_norm", fail)
    monkeypatch.setattr(row_kernels, "torch_gating", fail)


def random(*shape):
    return torch.randn(shape).to(torch.bfloat16)


def normalised(x, weight):
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


def close(found, expected):
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected.double(), rtol=HALF_BIT, atol=1e-30)


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("size", [16, 1024])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_norm(norms: NumbaNorms, refused: None, count: int, size: int, kind: torch.dtype) -> None:
    x, weight = random(count, size), torch.randn(size).to(kind)
    close(norms.norm(x, weight, EPS), normalised(x, weight))


@pytest.mark.parametrize("count", [1, 3, 40])
def test_norm_of_heads(norms: NumbaNorms, refused: None, count: int) -> None:
    """As queries come: every head by itself, a part of a wider matrix."""
    x, weight = random(count, 7, 32)[:, 1:5], random(32)
    found = norms.norm(x, weight, EPS)
    assert found.shape == (count, 4, 32)
    close(found, normalised(x, weight))


@pytest.mark.parametrize("count", [1, 3, 40])
def test_add_norm(norms: NumbaNorms, refused: None, count: int) -> None:
    x, residual, weight = random(count, 64), random(count, 64), random(64)
    before = x.clone(), residual.clone()
    found, total = norms.add_norm(x, residual, weight, EPS)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    assert torch.equal(total, x + residual)
    close(found, normalised(total, weight))


@pytest.mark.parametrize("count", [1, 3, 40])
def test_gate(norms: NumbaNorms, refused: None, count: int) -> None:
    both = random(count, 96) * 3
    gate, up = both.double().chunk(2, dim=-1)
    close(silu_gate(both), gate * gate.sigmoid() * up)


def test_a_gate_far_from_zero(norms: NumbaNorms) -> None:
    both = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30] + [1.0] * 25]).bfloat16()
    found = silu_gate(both)
    assert found.isfinite().all()
    gate, up = both.double().chunk(2, dim=-1)
    torch.testing.assert_close(found.double(), gate * gate.sigmoid() * up, rtol=2**-7, atol=1e-8)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row(norms: NumbaNorms, value: float) -> None:
    x, weight = random(3, 32), random(32)
    x[1, 4] = value
    sums = norms.add_norm(x, x, weight, EPS)
    for found in (norms.norm(x, weight, EPS), silu_gate(x), *sums):
        assert found.isfinite().all(dim=1).tolist() == [True, False, True]


def test_a_row_does_not_depend_on_the_others(norms: NumbaNorms) -> None:
    x, weight = random(70, 64), random(64)
    whole, gates = norms.norm(x, weight, EPS), silu_gate(x)
    for first, end in ((0, 1), (5, 6), (10, 70)):
        assert torch.equal(norms.norm(x[first:end], weight, EPS), whole[first:end])
        assert torch.equal(silu_gate(x[first:end]), gates[first:end])


def test_views_are_read_with_their_strides(norms: NumbaNorms, refused: None) -> None:
    wide, weight = random(6, 128), random(64)
    part = wide[::2, :64]
    assert torch.equal(norms.norm(part, weight, EPS), norms.norm(part.clone(), weight, EPS))
    assert torch.equal(silu_gate(wide[1:, 32:96]), silu_gate(wide[1:, 32:96].clone()))
    x, residual = wide[:, 64:], wide[:, :64]
    found = norms.add_norm(x, residual, weight, EPS)
    expected = norms.add_norm(x.clone(), residual.clone(), weight, EPS)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_does_not_fit_goes_to_torch(norms: NumbaNorms, dtype: torch.dtype) -> None:
    size = 16 if dtype == torch.float32 else 17
    reference = TorchNorms()
    x, residual = torch.randn(2, 4, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    assert torch.equal(norms.norm(x, weight, EPS), reference.norm(x, weight, EPS))
    found = norms.add_norm(x, residual, weight, EPS)
    expected = reference.add_norm(x, residual, weight, EPS)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    both = torch.randn(4, 2 * size).to(dtype)
    assert torch.equal(silu_gate(both.clone()), torch_gating(both.clone(), "silu"))


def test_weights_of_two_norms_are_not_mixed_up(norms: NumbaNorms) -> None:
    x = random(2, 16)
    for scale in (1.0, 2.0, 3.0):  # each weight may get the address of one that has gone
        weight = torch.full((16,), scale).bfloat16()
        close(norms.norm(x, weight, EPS), normalised(x, weight))


def test_warming_up_changes_nothing() -> None:
    warm_up()
