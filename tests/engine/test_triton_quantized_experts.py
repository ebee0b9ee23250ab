"""Quantised experts on a device: parity under Triton's interpreter, stacking, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.engine.model.quantized_weight import quantize_int4, quantize_int8
from baton.engine.triton.quantized_experts import stacked_codes
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name", ["int8, few rows", "int4 by groups of 32, many rows", "fp8", "int8, fixed"]
)
def test_parity(product_checks: dict[str, JsonObject], name: str) -> None:
    assert product_checks[f"experts, {name}"]["good"], product_checks[f"experts, {name}"]["said"]


def test_matrices_are_stacked_in_their_order() -> None:
    weights = [quantize_int4(torch.randn(6, 64), 32) for _ in range(3)]
    stack = stacked_codes(iter(weights), 3, CPU)
    assert (stack.code_dtype, stack.group, len(stack)) == ("int4", 32, 3)
    for index, weight in enumerate(weights):
        assert torch.equal(stack.codes[index], weight.codes)
        assert torch.equal(stack.scales[index], weight.scales)
        assert torch.equal(stack.zeros[index], weight.zeros)


def test_fp8_is_kept_as_its_bits() -> None:
    weight = quantize_int8(torch.randn(4, 16))
    fp8 = replace(weight, code_dtype="fp8", codes=torch.randn(4, 16).to(torch.float8_e4m3fn))
    stack = stacked_codes([fp8, fp8], 2, CPU)
    assert stack.codes.dtype == torch.uint8 and stack.zeros is None
    assert torch.equal(stack.codes[1].view(torch.float8_e4m3fn).float(), fp8.codes.float())


@pytest.mark.parametrize("how", ["kind", "zeros", "group", "order"])
def test_experts_that_are_unlike_the_first_are_refused_by_name(how: str) -> None:
    plain = torch.randn(6, 64)
    first = quantize_int4(plain, 32)
    other = {
        "kind": quantize_int8(plain),
        "zeros": replace(first, zeros=None),
        "group": quantize_int4(plain, 64),
        "order": replace(first, order=torch.arange(64)),
    }[how]
    with pytest.raises(ModelError, match=r"expert 1 has another.*worker\.device to cpu"):
        stacked_codes([first, other], 2, CPU)


@pytest.mark.parametrize(("columns", "group", "said"), [(64, 16, "int4 with"), (40, 8, "multiple")])
def test_groups_that_the_kernel_cannot_take_are_refused(
    columns: int, group: int, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        stacked_codes([quantize_int4(torch.randn(2, columns), group)], 1, CPU)
