"""The benchmark of loading runs on the small model. Judges no speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.models.embedded import embedded_model

FOLDER = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's counters")
def test_it_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "loading.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loading", "--quick", "--rounds=1", "--threads=2"]
        + [f"--json={file}"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    figures = {figure["name"]: figure for figure in written["figures"]}
    seconds = figures["load_s"]["value"], figures["load_one_thread_s"]["value"]
    assert min(seconds) > 0
    assert figures["load_speedup"]["value"] == pytest.approx(seconds[1] / seconds[0])
    stored = (embedded_model() / "model.safetensors").stat().st_size
    assert figures["load_gbps"]["value"] * seconds[0] * 1e9 == pytest.approx(stored)
    assert figures["read_gbps"]["value"] > 0
    assert figures["load_peak_ratio"]["value"] >= 0
    assert figures["rounds"]["value"] == 1
