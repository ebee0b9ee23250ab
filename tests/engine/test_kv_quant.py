"""What codes mean, and that a row of numbers gives the same ones wherever it stands."""

from __future__ import annotations

import pytest
import torch

from baton.engine.memory.kv_quant import FP8_E4M3, INT8, KV_QUANTS, MIN_MAGNITUDE, KvQuant


@pytest.fixture(params=[INT8, FP8_E4M3], ids=["int8", "fp8"])
def codes(request: pytest.FixtureRequest) -> KvQuant:
    return request.param


def test_names() -> None:
    assert {"int8": INT8, "fp8_e4m3": FP8_E4M3} == KV_QUANTS


def test_int8_by_hand() -> None:
    found, scales = INT8.encode(torch.tensor([[127.0, -127.0, 63.5, 62.5, 0.4, -0.6]]))
    assert found.tolist() == [[127, -127, 64, 62, 0, -1]]  # ties go to the even code
    assert scales.tolist() == [1.0]
    assert INT8.decode(found, scales).tolist() == [[127.0, -127.0, 64.0, 62.0, 0.0, -1.0]]


def test_fp8_by_hand() -> None:
    numbers = torch.tensor([[448.0, -224.0, 1.0625, 1.1875, 2.0**-9, 2.0**-10, 0.0, -17.0]])
    found, scales = FP8_E4M3.encode(numbers)
    assert scales.tolist() == [1.0]
    expected = [[448.0, -224.0, 1.0, 1.25, 2.0**-9, 0.0, 0.0, -16.0]]  # ties again
    assert FP8_E4M3.decode(found, scales).tolist() == expected


def test_the_error_is_bounded_by_the_rows_greatest_magnitude(codes: KvQuant) -> None:
    torch.manual_seed(1)
    numbers = torch.randn(200, 64) * torch.logspace(-20, 20, 200)[:, None]
    found = codes.decode(*codes.encode(numbers))
    most = numbers.abs().amax(-1, keepdim=True)
    if codes is INT8:
        assert ((found - numbers).abs() <= most * (0.5 / 127 + 1e-6)).all()
    else:  # three bits after the first one; below 2^-6 of 448, the last place of that
        bound = torch.maximum(numbers.abs() / 16, most * 2.0**-10 / 448) * (1 + 1e-5)
        assert ((found - numbers).abs() <= bound).all()
    lost = ((found - numbers) / most).norm() / (numbers / most).norm()
    assert lost < (0.01 if codes is INT8 else 0.03)


def test_the_greatest_magnitude_is_kept(codes: KvQuant) -> None:
    numbers = torch.randn(50, 32)
    found = codes.decode(*codes.encode(numbers))
    highest = numbers.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(found.gather(-1, highest), numbers.gather(-1, highest))


def test_a_row_does_not_depend_on_its_neighbours(codes: KvQuant) -> None:
    numbers = torch.randn(40, 3, 2, 32)
    together, scales = codes.encode(numbers)
    for row in (0, 17, 39):
        alone, scale = codes.encode(numbers[row])
        assert torch.equal(alone.view(torch.uint8), together[row].view(torch.uint8))
        assert torch.equal(scale, scales[row])


def test_bfloat16_numbers_give_the_codes_of_their_values(codes: KvQuant) -> None:
    numbers = torch.randn(40, 32).to(torch.bfloat16)
    narrow, wide = codes.encode(numbers), codes.encode(numbers.float())
    assert torch.equal(narrow[0].view(torch.uint8), wide[0].view(torch.uint8))
    assert torch.equal(narrow[1], wide[1])


def test_zeros_and_numbers_next_to_nothing(codes: KvQuant) -> None:
    numbers = torch.zeros(3, 8)
    numbers[1, 3], numbers[2, 3] = MIN_MAGNITUDE / 2, MIN_MAGNITUDE
    found, scales = codes.encode(numbers)
    assert not codes.decode(found, scales)[:2].any() and scales[:2].tolist() == [0.0, 0.0]
    assert codes.decode(found, scales)[2, 3].item() == pytest.approx(MIN_MAGNITUDE)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_shows_in_all_of_its_row(codes: KvQuant, bad: float) -> None:
    numbers = torch.randn(3, 8)
    numbers[1, 5] = bad
    found = codes.decode(*codes.encode(numbers))
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_numbers_close_to_the_greatest_do_not_overflow(codes: KvQuant) -> None:
    most = torch.finfo(torch.float32).max / 2
    numbers = torch.tensor([[most, -most, most / 3, 0.0]])
    found = codes.decode(*codes.encode(numbers))
    assert found.isfinite().all()
    torch.testing.assert_close(found, numbers, rtol=0.07, atol=0)
