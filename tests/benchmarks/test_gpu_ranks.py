"""The part of `make gpu` that needs two GPUs: what it says without, and its dry run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts import ranks as gpu_ranks
from benchmarks.gpu_parts.speed import Given, Skipped

FOLDER = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_gpus_for_ranks_are_named(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(Skipped, match=f"2 ranks need 2 GPUs, and torch sees {count}"):
        next(gpu_ranks.ranks(Given(torch.device("cuda"), False)))


@pytest.mark.timeout(500)
def test_a_dry_run_holds_ranks_against_one_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--only", "ranks"],
        cwd=FOLDER,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("ranks_held", "deterministic_ranks_held"):
        assert f"| ranks | {name} | 7 | of 7 |" in done.stdout


def test_ranks_get_what_all_other_parts_leave() -> None:
    assert list(gpu.LIMITS)[-1] == "ranks" and gpu._needed_after(("ranks",), gpu.ORDER) == 0
