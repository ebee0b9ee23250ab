"""The arithmetic of the benchmark, and a few leaves on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.cancellation import Left, figures, idle, p99

ROOT = Path(__file__).resolve().parents[2]


def test_the_99th_percentile_is_a_value_that_was_measured() -> None:
    assert p99([float(n) for n in range(1, 101)]) == 99.0
    assert p99([float(n) for n in range(1, 11)]) == 10.0
    assert p99([3.0]) == 3.0


@pytest.mark.parametrize("of", ["requests", "running", "waiting", "open_handoffs"])
def test_a_worker_with_anything_to_do_is_not_idle(of: str) -> None:
    assert idle({"blocks": {"used": 3}, "running": 0})
    assert not idle({"running": 0, of: 1})


def test_work_may_go_on_for_one_step_and_a_tenth_of_a_second() -> None:
    def verdict(stopped_ms: float, free_ms: float) -> dict[str, bool | None]:
        made = figures([Left(1, stopped_ms, free_ms)], 3, 0.5, step=20.0)
        return {figure.name: figure.holds for figure in made if figure.holds is not None}

    assert verdict(119.0, 900.0) == {"stopped_ms_p99": True, "free_ms_p99": True}
    assert verdict(121.0, 1100.0) == {"stopped_ms_p99": False, "free_ms_p99": False}


def test_clients_leave_a_real_fleet(tmp_path: Path) -> None:
    file = tmp_path / "cancellation.json"
    done = subprocess.run(
        [sys.executable, "-m", "chaos.cancellation", "--leaves=6", "--at-once=2"]
        + ["--fleet=1,1,1", f"--json={file}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reported = {figure["name"]: figure for figure in json.loads(file.read_text())["figures"]}
    found = {name: figure["value"] for name, figure in reported.items()}
    assert found["leaves"] == 6 and found["step_ms"] > 0
    assert 0 < found["stopped_ms_p50"] <= found["free_ms_most"]
    assert reported["free_ms_p99"]["holds"], found  # a second, some ten times what it takes
