"""The passes over a row, each called from a Numba function on plain memory."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from baton.engine.cpu.dot_bf16 import supported
from baton.engine.cpu.row_ir import add_squares, copy_row, gate_row, rotate_row, scale, squares

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
ROOM = 8  # numbers behind a result that must stay


@numba.njit
def run_squares(at, vectors):
    return squares(at, vectors)


@numba.njit
def run_add_squares(left, right, out, vectors):
    return add_squares(left, right, out, vectors)


@numba.njit
def run_scale(at, weights, out, vectors, factor):
    scale(at, weights, out, vectors, factor)


@numba.njit
def run_gate(gate, up, out, vectors):
    gate_row(gate, up, out, vectors)


@numba.njit
def run_turn(at, cos, sin, out, half):
    rotate_row(at, cos, sin, out, half)


@numba.njit
def run_copy(at, out, vectors):
    copy_row(at, out, vectors)


def random(size):
    return torch.randn(size).bfloat16()


def result(size):
    return torch.full((size + ROOM,), 7.0).bfloat16()


@pytest.mark.parametrize("vectors", [1, 3])
def test_squares(vectors: int) -> None:
    x = random(16 * vectors)
    found = run_squares(x.data_ptr(), vectors)
    assert found == pytest.approx(x.double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("vectors", [1, 3])
def test_add_squares(vectors: int) -> None:
    left, right, out = random(16 * vectors), random(16 * vectors), result(16 * vectors)
    found = run_add_squares(left.data_ptr(), right.data_ptr(), out.data_ptr(), vectors)
    assert torch.equal(out[:-ROOM], left + right) and (out[-ROOM:] == 7).all()
    assert found == pytest.approx(out[:-ROOM].double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("vectors", [1, 3])
def test_scale(vectors: int) -> None:
    x, weights, out = random(16 * vectors), torch.randn(16 * vectors), result(16 * vectors)
    run_scale(x.data_ptr(), weights.data_ptr(), out.data_ptr(), vectors, np.float32(1.7))
    assert torch.equal(out[:-ROOM], (x.float() * (np.float32(1.7) * weights)).bfloat16())
    assert (out[-ROOM:] == 7).all()


def test_gate() -> None:
    far = torch.tensor([-1e30, -100.0, 100.0, 1e30] * 4).bfloat16()
    gate, up, out = torch.cat((random(32), far)), random(48), result(48)
    run_gate(gate.data_ptr(), up.data_ptr(), out.data_ptr(), 3)
    wide = gate.double()
    expected = wide * wide.sigmoid() * up.double()
    torch.testing.assert_close(out[:-ROOM].double(), expected, rtol=2**-7, atol=1e-7)
    assert (out[-ROOM:] == 7).all()


def test_a_gate_that_is_not_a_number_stays_one() -> None:
    gate, out = torch.full((16,), torch.nan).bfloat16(), result(16)
    run_gate(gate.data_ptr(), random(16).data_ptr(), out.data_ptr(), 1)
    assert out[:-ROOM].isnan().all()


@pytest.mark.parametrize("half", [1, 2])
def test_turn(half: int) -> None:
    size = 32 * half
    x, cos, sin, out = random(size), random(size), random(size), result(size)
    run_turn(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), half)
    wide = x.double()
    expected = wide * cos.double() + wide.roll(size // 2) * sin.double()
    torch.testing.assert_close(out[:-ROOM].double(), expected, rtol=2**-8, atol=1e-6)
    assert (out[-ROOM:] == 7).all()


def test_turn_in_place() -> None:
    x, cos, sin, out = random(64), random(64), random(64), result(64)
    run_turn(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), 2)
    run_turn(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), x.data_ptr(), 2)
    assert torch.equal(x, out[:-ROOM])


def test_copy() -> None:
    x, out = random(32), result(32)
    run_copy(x.data_ptr(), out.data_ptr(), 2)
    assert torch.equal(out[:-ROOM], x) and (out[-ROOM:] == 7).all()
