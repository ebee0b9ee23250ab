"""The part of `make gpu` that needs two GPUs: what it says without, and its dry run."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts import ranks as gpu_ranks
from benchmarks.gpu_parts.speed import Given, Skipped
from tests.support.gpu_dry_run import gpu_dry_run


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_gpus_for_ranks_are_named(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(Skipped, match=f"2 ranks need 2 GPUs, and torch sees {count}"):
        next(gpu_ranks.ranks(Given(torch.device("cuda"), False)))


@pytest.mark.timeout(500)
def test_a_dry_run_holds_ranks_against_one_process() -> None:
    table = gpu_dry_run("ranks", timeout_s=480)
    for name in ("ranks_held", "deterministic_ranks_held"):
        assert f"| ranks | {name} | 7 | of 7 |" in table


def test_ranks_get_what_all_other_parts_leave() -> None:
    assert list(gpu.LIMITS)[-1] == "ranks" and gpu.needed_after_s(("ranks",), gpu.ORDER) == 0
