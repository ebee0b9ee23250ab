"""KV in eight bits in the GPU's kernels: held to `KvQuant` and torch under triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from baton.engine.memory.kv_quant import FP8_E4M3, INT8
from baton.engine.triton.kv_quant import codes_name, scale_strides, stored_bytes
from tests.support.json_values import JsonObject


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_codes_and_scales_are_those_of_torch_bit_for_bit(
    codes_checks: dict[str, JsonObject], name: str
) -> None:
    """Rows that are zero, tiny, great, not finite, and between two codes; whatever turns."""
    results = {k: v for k, v in codes_checks.items() if k.startswith(f"write, {name}")}
    assert len(results) == 2
    assert [v["error"] for v in results.values()] == [0, 0], results


def test_attention_is_that_of_torch_over_the_same_codes(
    codes_checks: dict[str, JsonObject],
) -> None:
    results = {k: v for k, v in codes_checks.items() if k.startswith("step")}
    assert {k: v for k, v in results.items() if not v["good"]} == {}
    for word in ("int8", "fp8_e4m3", "float32", "float16", "bfloat16", "deterministic", "broken"):
        assert any(word in name for name in results), word


def test_the_checks_can_fail(codes_checks: dict[str, JsonObject]) -> None:
    for name in ("write, a wrong number is noticed", "step, a wrong scale is noticed"):
        assert codes_checks[name]["good"], codes_checks[name]["said"]


def test_kernels_learn_what_the_pool_holds() -> None:
    assert codes_name(torch.empty(1, dtype=torch.int8)) == INT8.name
    assert codes_name(torch.empty(1, dtype=torch.float8_e4m3fn)) == FP8_E4M3.name
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert codes_name(torch.empty(1, dtype=dtype)) == ""


def test_fp8_is_given_as_its_bits() -> None:
    """sm_80 has no such kind of number."""
    numbers = torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn)
    assert stored_bytes(numbers).tolist() == [0x38, 0xFE]
    assert stored_bytes(numbers).data_ptr() == numbers.data_ptr()
    plain = torch.zeros(3, dtype=torch.int8)
    assert stored_bytes(plain) is plain


def test_a_plain_pool_has_no_scales() -> None:
    """None is a compile-time value: the kernel has no such argument."""
    assert scale_strides(None) == (None, None, None)
    assert scale_strides(torch.zeros(5, 4, 3, 2, 8).select(2, 1)) == (192, 48, 8)
