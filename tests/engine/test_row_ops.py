"""Norms against the formula; functions whose value does not depend on the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from baton.engine.model.row_ops import TorchNorms, in_whole_vectors

FUNCTIONS = [torch.sigmoid, torch.exp, torch.tanh, lambda x: (x.abs() + 1) ** 1.0625]


def formula(x, weight, eps):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(
    ("kind", "of_weight", "allowed"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.bfloat16, torch.float32, 1e-2),
    ],
)
def test_norm_and_norm_of_a_sum(kind: torch.dtype, of_weight: torch.dtype, allowed: float) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 5, 48).to(kind)
    weight = torch.randn(48).to(of_weight)
    norms = TorchNorms()
    out = norms.norm(x, weight, 1e-5)
    assert out.dtype == kind
    torch.testing.assert_close(out.double(), formula(x, weight, 1e-5), rtol=allowed, atol=allowed)
    out, total = norms.add_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual) and torch.equal(out, norms.norm(total, weight, 1e-5))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("columns", [1, 7, 64, 130])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_do_not_depend_on_each_other(
    threads: None, function: Callable[[torch.Tensor], torch.Tensor], columns: int
) -> None:
    x = torch.randn(700, columns, generator=torch.Generator().manual_seed(columns))
    whole = in_whole_vectors(function, x)
    assert whole.shape == x.shape
    torch.testing.assert_close(whole, function(x), rtol=1e-6, atol=1e-7)
    for first, end in ((0, 1), (3, 4), (5, 38), (511, 700), (0, 513)):
        assert torch.equal(in_whole_vectors(function, x[first:end]), whole[first:end])


def test_what_is_given_to_the_function_is_whole() -> None:
    seen = []
    in_whole_vectors(lambda x: seen.append(x.shape) or x, torch.ones(300, 70))
    assert {width for _, width in seen} == {128}
    assert sum(rows for rows, _ in seen) == 300 and max(rows for rows, _ in seen) == 128


def test_a_gpu_computes_all_at_once() -> None:
    """It would launch a kernel for each part; its numbers have threads of their own."""
    there = SimpleNamespace(is_cuda=True)
    assert in_whole_vectors(lambda x: ("computed", x), there) == ("computed", there)
