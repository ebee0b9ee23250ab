"""The benchmark of the deterministic mode runs on the small model. Judges no speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2]
STEPS = ("prefill_1024", "decode_bs32", "decode_bs1")


def test_it_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.deterministic", "--quick", "--rounds=1"]
        + [f"--json={file}"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    figures = {figure["name"]: figure for figure in written["figures"]}
    for step in STEPS:
        assert figures[f"deterministic_cost_{step}"]["value"] > 0
        assert figures[f"deterministic_cpu_cost_{step}"]["value"] > 0
        assert " over " in figures[f"deterministic_cost_{step}"]["beside"]
    assert figures["rounds"]["value"] == 1
    assert "benchmarks.deterministic" in written["command"]
