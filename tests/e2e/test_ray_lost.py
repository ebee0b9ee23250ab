"""Ray's head is lost: serving goes on, and only placing waits until it is back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

COMMAND = [sys.executable, "-P", "-m", "baton.deploy.cli.main"]
HEAD = ("raylet", "gcs_server")
TOKENS = 600


def programs(marker: str) -> dict[int, str]:
    """The processes that carry this marker in their environment, with their programs' names."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                program = (entry / "cmdline").read_bytes().split(b"\0")[0].decode()
                found[int(entry.name)] = Path(program).name
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", "--launcher", "ray"],
        env=os.environ | {"BATON_TEST_MARKER": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    process.kill()
    process.communicate(timeout=10)
    assert programs(f"BATON_TEST_MARKER={tmp_path}") == {}


def said(process: subprocess.Popen[str], pattern: str) -> str:
    """Read what it says until a line matches; the first group, or the line."""
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if found := re.search(pattern, line):
            return found[1] if found.groups() else line
    raise AssertionError("".join(lines))


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_requests_are_answered_without_the_head_of_ray(
    served: subprocess.Popen[str], tmp_path: Path
) -> None:
    url = said(served, r"Ready at (http://\S+)")
    body = {"model": "baton-tiny", "prompt": "Tell me a story.", "temperature": 0}
    long = {**body, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    asked = {**long, "stream_options": {"include_usage": True}}
    used, ended, killed = 0, "", False
    with httpx.Client(base_url=url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=asked) as answer:
            for line in answer.iter_lines():
                if not killed and line.startswith("data: {"):
                    marked = programs(f"BATON_TEST_MARKER={tmp_path}")
                    head = [pid for pid, program in marked.items() if program in HEAD]
                    assert len(head) == 2, marked
                    for pid in head:
                        os.kill(pid, signal.SIGKILL)
                    killed = True
                    fresh = client.post("/v1/completions", json={**body, "max_tokens": 8})
                    assert fresh.status_code == 200, fresh.text
                ended = line or ended
                if '"usage":{' in line:
                    used = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
        assert (ended, used) == ("data: [DONE]", TOKENS)
        said(served, r"ray died .*; restarted")
        assert client.post("/v1/completions", json={**body, "max_tokens": 8}).status_code == 200
    served.send_signal(signal.SIGINT)
    assert served.wait(60) == 0
