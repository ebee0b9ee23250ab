"""The exponential and its kin: how exact they are, and that no neighbour changes them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from baton.engine.cpu.compiled import compiled
from baton.engine.cpu.strict_kernels import exp, fma, tanh


def _exps(x, out):
    for i in range(x.shape[0]):
        out[i] = exp(x[i])


def _tanhs(x, out):
    for i in range(x.shape[0]):
        out[i] = tanh(x[i])


def _fmas(a, b, c, out):
    for i in range(a.shape[0]):
        out[i] = fma(a[i], b[i], c[i])


def run(function, *arrays):
    out = np.empty_like(arrays[0])
    function(*arrays, out)
    return out


@pytest.fixture(scope="module")
def exps() -> Callable[..., None]:
    return compiled(_exps, strict=True)


def test_exp_is_within_three_units_in_the_last_place(exps: Callable[..., None]) -> None:
    x = np.linspace(-86.9, 87.9, 200_001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    wrong = np.abs(run(exps, x) - exact) / np.spacing(exact.astype(np.float32))
    assert wrong.max() < 3


def test_exp_at_its_ends(exps: Callable[..., None]) -> None:
    x = np.array([0, -0.0, -np.inf, -1e30, np.inf, 200, np.nan], dtype=np.float32)
    one, also_one, least, low, most, high, nan = run(exps, x)
    assert one == also_one == 1.0
    assert 0 < least == low < 2e-38
    assert most == high == math.inf
    assert math.isnan(nan)


def test_exp_does_not_depend_on_its_place(exps: Callable[..., None]) -> None:
    """A vector's body and what is left at its end give the same bits."""
    x = np.random.default_rng(1).normal(scale=20, size=257).astype(np.float32)
    whole = run(exps, x)
    for first, count in ((0, 1), (1, 15), (3, 33), (100, 64), (201, 56)):
        assert (run(exps, x[first : first + count].copy()) == whole[first : first + count]).all()


def test_tanh() -> None:
    x = np.linspace(-60, 60, 10_001, dtype=np.float32)
    found = run(compiled(_tanhs, strict=True), x)
    assert np.abs(found - np.tanh(x.astype(np.float64))).max() < 2e-7


def test_fma_rounds_once() -> None:
    e = np.float32(2.0**-13)
    a, c = np.array([1 + e], dtype=np.float32), np.array([-1 - 2 * e], dtype=np.float32)
    assert run(compiled(_fmas, strict=True), a, a, c) == np.float32(2.0**-26)
    assert a * a + c == 0.0  # rounded twice


def test_strict_code_keeps_the_order_of_a_sum() -> None:
    def _sum(x, out):
        for i in range(x.shape[0]):
            out[0] += x[i]

    x = np.array([2.0**24, *[1.0] * 64], dtype=np.float32)
    out = np.zeros(1, dtype=np.float32)
    compiled(_sum, strict=True)(x, out)
    assert out[0] == 2.0**24  # each one is lost; in any other order some would count
