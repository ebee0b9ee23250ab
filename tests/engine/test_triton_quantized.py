"""Products with packed weights: parity, the references by hand, and refusals."""

from __future__ import annotations

import pytest
import torch

from baton.engine.triton.quantized import dequantized_reference, quantized_matmul
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject

NAMES = [
    "quantized int8 by channel, 1 row, fp32",
    "quantized int8 by groups of 32, 5 rows, bf16",
    "quantized int4 with zeros, 3 rows, fp32",
    "quantized int4 about 8, 17 rows, bf16",
    "quantized int4 by groups of 16, 2 rows, fp32",
    "quantized fp8 by channel, 2 rows, fp32",
    "quantized fp8 by groups, 65 rows, bf16",
    "every E4M3 number is decoded exactly",
    "quantized weight as loaded, last group cut, columns permuted",
]


@pytest.mark.parametrize("name", NAMES)
def test_parity(product_checks: dict[str, JsonObject], name: str) -> None:
    assert product_checks[name]["good"], product_checks[name]["said"]


def test_int4_holds_the_even_column_in_the_low_half() -> None:
    packed = torch.tensor([[0x21, 0xF8]], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 2.0]])
    plain = dequantized_reference(packed, scales, "int4", None, torch.float32)
    assert plain.tolist() == [[-3.5, -3.0, 0.0, 14.0]]
    zeros = torch.tensor([[1.0, 15.0]])
    plain = dequantized_reference(packed, scales, "int4", zeros, torch.float32)
    assert plain.tolist() == [[0.0, 0.5, -14.0, 0.0]]


def test_int8_and_fp8_are_their_values_times_the_scale() -> None:
    scales = torch.tensor([[0.5], [2.0]])
    values = torch.tensor([[-127, 3], [4, 127]], dtype=torch.int8)
    plain = dequantized_reference(values, scales, "int8", None, torch.float32)
    assert plain.tolist() == [[-63.5, 1.5], [8.0, 254.0]]
    values = torch.tensor([[448.0, -0.001953125], [1.5, 0.0]]).to(torch.float8_e4m3fn)
    plain = dequantized_reference(values, scales, "fp8", None, torch.float32)
    assert plain.tolist() == [[224.0, -0.0009765625], [3.0, 0.0]]


@pytest.mark.parametrize(("depth", "groups"), [(48, 6), (48, 5)])
def test_a_group_that_the_kernel_cannot_take_is_refused(depth: int, groups: int) -> None:
    values, scales = torch.zeros(4, depth, dtype=torch.int8), torch.ones(4, groups)
    with pytest.raises(ModelError, match=f"{depth} columns has {groups} groups"):
        quantized_matmul(torch.zeros(1, depth), values, scales, "int8")
