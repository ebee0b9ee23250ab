"""A benchmark run as a user runs it, for the tests that read what it writes: in `make nightly`.
What all benchmarks share is tested in `make test`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.benchmark_runs import Measure, Reported
from tests.support.machine_speed import slowness

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1]
SHARED = {"test_report.py"}  # starts no benchmark


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.path.name not in SHARED:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture
def measured(tmp_path: Path) -> Measure:
    """`measured("handoff", "--rounds=1")`: what `python -m benchmarks.handoff --quick` tells."""

    def run(name: str, *flags: str, timeout_s: float = 110.0) -> Reported:
        file = tmp_path / f"{name}.json"
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", "--quick", *flags, f"--json={file}"],
            cwd=FOLDER,
            env=os.environ | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"},
            capture_output=True,
            text=True,
            timeout=timeout_s * slowness(),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        written = json.loads(file.read_text())
        figures = {figure["name"]: figure for figure in written["figures"]}
        return Reported(written, figures, done.stdout)

    return run
