"""The first of the two commands, as a stranger runs it, with and without Ray."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

FIRST_TOKEN_S = 60.0
COMMAND = [sys.executable, "-P", "-m", "baton.deploy.cli"]


def marked(marker: str) -> list[int]:
    """Processes that carry this marker in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("launcher", ["process", "ray"])
def test_the_demo_streams_an_answer_and_leaves_no_process(tmp_path: Path, launcher: str) -> None:
    marker = f"BATON_TEST_MARKER={tmp_path.name}-{launcher}"
    name, value = marker.split("=")
    begun = time.monotonic()
    done = subprocess.run(
        [*COMMAND, "demo", "--once", "--port", "0", "--launcher", launcher],
        env=os.environ | {name: value, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - begun < FIRST_TOKEN_S
    assert "First token after" in done.stdout, done.stdout
    assert "random weights" in done.stdout  # it says that the answers are noise
    assert marked(marker) == []


@pytest.mark.timeout(120)
def test_serve_answers_and_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    marker = f"BATON_TEST_MARKER={tmp_path.name}-serve"
    name, value = marker.split("=")
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", "--launcher", "process"],
        env=os.environ | {name: value, "XDG_RUNTIME_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        url = _ready_url(process)
        with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
    finally:
        process.kill()
        process.communicate(timeout=10)
    assert marked(marker) == []


def _ready_url(process: Any) -> str:
    lines = []
    for line in process.stdout:
        lines.append(line)
        found = re.search(r"Ready at (http://\S+)", line)
        if found:
            return found.group(1)
    raise AssertionError("".join(lines))
