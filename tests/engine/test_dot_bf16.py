"""Numbers in vectors, rounded and widened as the kernels do it."""

from __future__ import annotations

import numba
import pytest
import torch
from numba.core import types
from numba.extending import intrinsic

from baton.engine.cpu import dot_bf16
from baton.engine.cpu.dot_bf16 import LANES, supported

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")


@intrinsic
def narrow(_typing, source, target):
    def generate(context, builder, _signature, values):
        value = dot_bf16.load(builder, values[0], 0, dot_bf16.FLOATS)
        dot_bf16.store(builder, dot_bf16.narrowed(builder, value), values[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def widen(_typing, source, target):
    def generate(context, builder, _signature, values):
        value = dot_bf16.load(builder, values[0], 0, dot_bf16.BFLOATS)
        dot_bf16.store(builder, dot_bf16.widened(builder, value), values[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


ODD = [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 3.4e38, -3.4e38, 1e-45]
TIES = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 1 - 2**-9, 2.5, -7.0, 1e-38]


@pytest.mark.parametrize("has_instruction", [True, False])
def test_numbers_are_rounded_as_torch_rounds_them(
    monkeypatch: pytest.MonkeyPatch, has_instruction: bool
) -> None:
    if has_instruction and not dot_bf16.native():
        pytest.skip("this processor has but one way")
    monkeypatch.setattr(dot_bf16, "native", lambda: has_instruction)

    @numba.njit
    def there_and_back(source, target, back):
        narrow(source, target)
        widen(target, back)

    values = torch.tensor(ODD + TIES)
    assert len(values) == LANES
    if has_instruction:  # it may take the smallest numbers for nought
        values[values.abs() < 1.2e-38] = 0.0
    found, back = torch.zeros(LANES, dtype=torch.bfloat16), torch.zeros(LANES)
    there_and_back(values.data_ptr(), found.data_ptr(), back.data_ptr())
    exact = values.to(torch.bfloat16)
    assert torch.equal(found.nan_to_num(9.0), exact.nan_to_num(9.0))
    assert torch.equal(back.nan_to_num(9.0), exact.to(torch.float32).nan_to_num(9.0))
    assert found.isnan().equal(values.isnan()) and back.isnan().equal(values.isnan())
