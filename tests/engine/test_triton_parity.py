"""The parity checks can fail: on a wrong kernel, on NaN, and on an exception."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

CPU = torch.device("cpu")


def test_an_error_is_relative_and_nan_is_infinite(triton_parity: ModuleType) -> None:
    one = torch.tensor([3.0, 4.0])
    assert triton_parity.error(one, one) == 0
    assert triton_parity.error(torch.tensor([3.0, 4.5]), one) == pytest.approx(0.1)
    assert triton_parity.error(torch.tensor([3.0, float("nan")]), one) == float("inf")
    with pytest.raises(ValueError, match="shape"):
        triton_parity.error(one[:1], one)


def test_memory_is_poisoned_only_during_the_check(triton_parity: ModuleType) -> None:
    with triton_parity.poisoned():
        assert torch.empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int64) == 2**63 - 1).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_wrong_kernel_is_reported(
    triton_parity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_parity, "gated", lambda x, activation: x[:, : x.shape[1] // 2])
    found, allowed = triton_parity.CHECKS["gated silu fp32"](CPU, True)
    assert found > 100 * allowed


def test_an_unwritten_output_is_reported(
    triton_parity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(x, activation):
        return torch.empty(x.shape[0], x.shape[1] // 2)

    monkeypatch.setattr(triton_parity, "gated", forgetful)
    assert triton_parity.CHECKS["gated silu fp32"](CPU, True)[0] == float("inf")
