"""The compiled bfloat16 product, against float64 and against itself in other batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

import baton.engine.cpu.linear_numba as linear_numba
from baton.engine.cpu.linear import CpuMatrix
from baton.engine.cpu.linear_numba import Panels, can_pack
from tests.support.processors import PROCESSORS, pretend_processor

pytestmark = pytest.mark.skipif(not linear_numba.supported(), reason="this processor has no AVX2")
ROWS = [1, 2, 3, 5, 6, 7, 12, 13, 18, 19, 24, 25, 64]  # around the borders of tiles


def random(*shape):
    return torch.randn(*shape).to(torch.bfloat16)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 2), (192, 130), (128, 1024)])
def test_it_is_the_product_rounded_once(rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(rows)
    weight, x = random(outputs, inputs), random(rows, inputs)
    out = Panels(weight)(x)
    assert out.shape == (rows, outputs)
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T  # what float32 sums may lose
    error = (out.double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + scale * 2**-18).all()


@pytest.mark.parametrize("rows", [1, 9])
def test_a_bias_is_added_before_rounding(rows: int) -> None:
    torch.manual_seed(1)
    weight, bias, x = random(64, 64), random(64), random(rows, 64)
    exact = x.double() @ weight.double().T + bias.double()
    scale = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    error = (Panels(weight, bias)(x).double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + scale * 2**-18).all()


def test_a_row_does_not_depend_on_the_others_bit_for_bit() -> None:
    torch.manual_seed(2)
    panels, x = Panels(random(256, 512)), random(70, 512)
    together = panels(x)
    for rows in ROWS:
        assert torch.equal(panels(x[:rows]), together[:rows])
        assert torch.equal(panels(x[70 - rows :]), together[70 - rows :])


def test_threads_do_not_change_the_result() -> None:
    panels, x = Panels(random(640, 64)), random(9, 64)
    one = panels(x)
    torch.set_num_threads(2)
    try:
        assert torch.equal(panels(x), one)
    finally:
        torch.set_num_threads(1)


def test_many_rows_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    panels, x = Panels(random(64, 32)), random(50, 32)
    whole = panels(x)
    monkeypatch.setattr(linear_numba, "_BLOCK_ROWS", 16)
    assert torch.equal(panels(x), whole)


def test_rows_may_be_a_view() -> None:
    panels, wide = Panels(random(64, 32)), random(10, 96)
    for view in (wide[:, 32:64], wide[::2, :32], random(32, 10).T):
        assert torch.equal(panels(view), panels(view.contiguous()))


def test_nothing_beside_the_result_is_written() -> None:
    """Tiles write whole panels: the neighbours in memory must stay."""
    panels = Panels(random(128, 64))
    for rows in (1, 7, 20):
        assert panels(random(rows, 64)).isfinite().all()
    exact = torch.full((3, 64), 1.0, dtype=torch.bfloat16)
    ones = Panels(torch.ones(128, 64, dtype=torch.bfloat16))(exact)
    assert torch.equal(ones, torch.full((3, 128), 64.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", PROCESSORS)
def test_each_kind_of_processor_packs_what_is_faster(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pretend_processor(monkeypatch, kind)
    whole, part = random(128, 64), random(93, 64)  # whole panels, and not
    choices = [can_pack(whole), can_pack(part)]
    choices += [can_pack(each, batch_invariant=True) for each in (whole, part)]
    assert (
        choices
        == {
            "older than AVX2": [False, False, False, False],
            "AVX2": [True, True, True, True],
            "AVX-512": [False, False, False, False],  # oneDNN takes them, and keeps rows apart
            "AVX-512 BF16": [True, False, True, False],
            "AMX": [False, False, True, True],
        }[kind]
    )


def test_outputs_that_fill_no_panel_are_packed_without_fast_bf16() -> None:
    weight, bias, x = random(93, 64), random(93), random(9, 64)
    found = Panels(weight, bias)(x)
    whole = functional.pad(weight, (0, 0, 0, 35)), functional.pad(bias, (0, 35))
    assert found.is_contiguous() and torch.equal(found, Panels(*whole)(x)[:, :93])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_stays_in_its_row(value: float) -> None:
    x = random(8, 64)
    x[3, 5] = value
    finite = Panels(random(64, 64))(x).isfinite().all(dim=1)
    assert finite.tolist() == [True, True, True, False, True, True, True, True]


@pytest.mark.parametrize("kind", ["AVX2", "AVX-512 BF16", "AMX"])
def test_what_does_not_fit_is_not_taken(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pretend_processor(monkeypatch, kind)
    for weight in (
        random(64, 33),
        torch.randn(64, 32),
        torch.zeros(64, 32, dtype=torch.bfloat16, device="meta"),
    ):
        assert not can_pack(weight) and not can_pack(weight, batch_invariant=True)


def test_a_matrix_unit_is_not_used_for_batch_invariant_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """oneDNN's sums on AMX follow the number of rows and of threads."""
    pretend_processor(monkeypatch, "AMX")
    assert isinstance(CpuMatrix(random(64, 32), batch_invariant=True).product, Panels)
    assert isinstance(CpuMatrix(random(93, 32), batch_invariant=True).product, Panels)
    assert not isinstance(CpuMatrix(random(64, 32)).product, Panels)


@pytest.mark.parametrize("x", [torch.ones(2, 32), random(2, 16), random(2, 34)])
def test_rows_that_would_be_misread_are_refused(x: torch.Tensor) -> None:
    panels = Panels(random(64, 32))
    with pytest.raises(ValueError, match="by a bfloat16"):
        panels(x)


def test_it_is_compiled_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = linear_numba.compiled(linear_numba.multiply_walk, parallel=True)
    monkeypatch.setattr(linear_numba, "multiply", fresh)
    panels = Panels(random(64, 32), random(64))
    known = list(fresh.signatures)
    assert len(known) == 1
    panels(random(3, 32))
    assert list(fresh.signatures) == known
