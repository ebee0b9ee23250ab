"""The handoff benchmark runs on the small model and writes every figure. Judges no speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2]
NAMED = {
    "read_efficiency",
    "handoff_overhead_ms_p50",
    "ttft_ratio_1024",
    "second_token_ratio_1024",
}


def test_it_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "handoff.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.handoff", "--quick", "--rounds=1", f"--json={file}"],
        cwd=FOLDER,
        env=os.environ | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    figures = {figure["name"]: figure for figure in written["figures"]}
    assert figures.keys() >= NAMED
    assert all("limit" in figures[name]["beside"] for name in NAMED)
    assert figures["rounds"]["value"] == 1
    # what no clock may say, however slow the machine is
    assert figures["raw_read_last_ms"]["value"] > 0
    assert 0 < figures["landed_ms"]["value"] <= figures["verified_ms"]["value"]
    assert figures["verified_ms"]["value"] < figures["batched_ms"]["value"]
    assert "benchmarks.handoff" in written["command"]
    assert "read_efficiency" in done.stdout
