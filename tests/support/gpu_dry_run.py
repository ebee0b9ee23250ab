"""Parts of `make gpu` run in a process of their own, by Triton's interpreter instead of a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def gpu_dry_run(*parts: str, results: Path | None = None, timeout_s: float = 100.0) -> str:
    """Run the parts on small sizes and return the table that they print; `results` is the folder
    for their files. Raises AssertionError with all output if a part fails."""
    line = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--only", *parts]
    done = subprocess.run(
        [*line, *([f"--results={results}"] if results else [])],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
