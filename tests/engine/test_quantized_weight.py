from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton.engine.model.quantized_weight import (
    QuantizedWeight,
    group_for,
    joined,
    pack_pairs,
    quantize_int4,
    quantize_int8,
    unpack_pairs,
)


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def test_pairs_by_hand() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_pairs(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_pairs(pack_pairs(codes)), codes)


def test_values_by_hand() -> None:
    four = torch.tensor([[0x90, 0xF8]], dtype=torch.uint8)  # codes 0, 9, 8, 15
    scales = torch.tensor([[2.0, 0.5]])
    zeros = torch.tensor([[1, 15]], dtype=torch.int16)
    assert QuantizedWeight("int4", four, scales, 2).dequantized().tolist() == [[-16, 2, 0, 3.5]]
    with_zeros = QuantizedWeight("int4", four, scales, 2, zeros)
    assert with_zeros.dequantized().tolist() == [[-2, 16, -3.5, 0]]
    eight = torch.tensor([[-127, 3, 5]], dtype=torch.int8)
    cut = QuantizedWeight("int8", eight, scales, 2)  # the last group has one column
    assert cut.dequantized().tolist() == [[-254, 6, 2.5]]
    assert (cut.rows, cut.columns) == (1, 3)


def test_an_order_is_undone() -> None:
    codes = torch.tensor([[1, 2, 3]], dtype=torch.int8)
    order = torch.tensor([2, 0, 1])
    weight = QuantizedWeight("int8", codes, torch.ones(1, 1), 3, order=order)
    assert weight.dequantized().tolist() == [[2, 3, 1]]
    assert weight.values(slice(None)).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("columns", [64, 257])
def test_int8_is_within_half_a_step_and_a_hundredth(columns: int) -> None:
    torch.manual_seed(columns)
    weight = torch.randn(700, columns) * torch.rand(700, 1)
    found = quantize_int8(weight)
    step = found.scales
    assert ((found.dequantized() - weight).abs() <= 0.75 * step).all()  # rounded scales cut a bit
    assert relative(found.dequantized(), weight) < 0.01
    assert found.codes.abs().max() == 127


@pytest.mark.parametrize(("group", "bound"), [(32, 0.085), (64, 0.095), (128, 0.105)])
def test_int4_by_groups_is_within_a_tenth(group: int, bound: float) -> None:
    torch.manual_seed(group)
    weight = torch.randn(600, 256)
    found = quantize_int4(weight, group)
    assert found.scales.shape == found.zeros.shape == (600, 256 // group)
    assert 0.01 < relative(found.dequantized(), weight) < bound


def test_int4_of_one_sign_keeps_nought_exact() -> None:
    weight = torch.cat((torch.rand(4, 31) + 3, torch.zeros(4, 1)), dim=1)
    found = quantize_int4(weight, 32).dequantized()
    assert not found[:, -1].any()
    assert relative(found, weight) < 0.05


@pytest.mark.parametrize("quantize", [quantize_int8, lambda weight: quantize_int4(weight, 32)])
def test_noughts_and_the_tiniest_numbers_stay_finite(
    quantize: Callable[[torch.Tensor], QuantizedWeight],
) -> None:
    weight = torch.zeros(3, 32)
    weight[1] = 1e-38
    weight[2, 5] = 7.0
    found = quantize(weight).dequantized()
    assert found.isfinite().all()
    assert not found[:2].any()
    assert abs(found[2, 5] - 7) < 0.05


def test_joined_rows_keep_their_values() -> None:
    torch.manual_seed(0)
    parts = [quantize_int4(torch.randn(rows, 64), 32) for rows in (3, 5)]
    whole = joined(parts)
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))


def test_different_forms_are_not_joined() -> None:
    weight = torch.randn(4, 64)
    four, eight = quantize_int4(weight, 32), quantize_int8(weight)
    ordered = QuantizedWeight("int8", eight.codes, eight.scales, 64, order=torch.arange(64))
    other = QuantizedWeight("int8", eight.codes, eight.scales, 64, order=torch.arange(64).flip(0))
    centred = QuantizedWeight("int4", four.codes, four.scales, 32)
    assert joined([four, eight]) is None
    assert joined([four, quantize_int4(weight, 64)]) is None
    assert joined([eight, ordered]) is None
    assert joined([ordered, other]) is None
    assert joined([four, centred]) is None
    assert joined([ordered, ordered]) is not None
    assert joined([four]) is four


@pytest.mark.parametrize(("columns", "group"), [(4096, 128), (192, 64), (96, 32), (48, None)])
def test_the_largest_group_that_divides(columns: int, group: int | None) -> None:
    assert group_for(columns) == group
