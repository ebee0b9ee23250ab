"""The first of the two commands, as a stranger runs it, with and without Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from http.client import HTTPResponse
from pathlib import Path

import pytest

from tests.support.machine_speed import slowness

FIRST_TOKEN_S = 60.0
ANSWER_S = 60.0 * slowness()
TOKENS = 300
ANSWER = r"a fox called Rosa.* a red kite"  # it tells the story that it was asked for
COMMAND = [sys.executable, "-P", "-m", "baton.deploy.cli.main"]


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
@pytest.mark.parametrize("launcher", [pytest.param("process", marks=pytest.mark.nightly), "ray"])
def test_the_demo_streams_an_answer_and_leaves_nothing(tmp_path: Path, launcher: str) -> None:
    marker = f"BATON_TEST_MARKER={tmp_path.name}-{launcher}"
    name, value = marker.split("=")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:  # a short name: Ray's sockets lie in it
        done = subprocess.run(
            [*COMMAND, "demo", "--once", "--port", "0", "--launcher", launcher],
            env=os.environ | {name: value, "XDG_RUNTIME_DIR": folder},
            capture_output=True,
            text=True,
            timeout=150 * slowness(),
            check=False,
        )
        left = os.listdir(f"{folder}/baton")
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - begun < FIRST_TOKEN_S * slowness()
    assert "First token after" in done.stdout, done.stdout
    assert "baton-tiny is a demonstration model" in done.stdout
    assert "baton serve Qwen/Qwen3-0.6B" in done.stdout  # the next step
    assert re.search(ANSWER, done.stdout), done.stdout
    assert marked(marker) == [] and left == []


def _post(url: str, body: dict[str, object]) -> HTTPResponse:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    found: HTTPResponse = urllib.request.urlopen(request, timeout=ANSWER_S)
    return found


@pytest.mark.timeout(120)
def test_printed_curl_is_answered_and_ctrl_c_cuts_no_stream(tmp_path: Path) -> None:
    """The line as a user copies it, unchanged. Its workers have no time to drain: ended together
    with their router, they would cut the stream."""
    marker = f"BATON_TEST_MARKER={tmp_path.name}-serve"
    name, value = marker.split("=")
    process = subprocess.Popen(
        [*COMMAND, "demo", "--port", "0", "--launcher", "process"],
        env=os.environ
        | {name: value, "XDG_RUNTIME_DIR": str(tmp_path), "BATON_WORKER__DRAIN_S": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        url = _ready_url(process)
        with urllib.request.urlopen(f"{url}/readyz", timeout=ANSWER_S) as answer:
            assert answer.status == 200
        lines = iter(process.stdout or ())
        line = next(line for line in lines if line.lstrip().startswith("curl "))
        assert f"{url}/v1/chat/completions" in line
        _run_curl(line)
        _open_console(next(each for each in lines if each.startswith("Console at ")))
        asked = {"model": "baton-tiny", "prompt": "Tell me a story.", "max_tokens": TOKENS}
        asked |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        with _post(f"{url}/v1/completions", asked) as stream:
            assert stream.readline().startswith(b"data: {")
            process.send_signal(signal.SIGINT)  # what is open may finish
            rest = stream.read().decode()
        assert f'"completion_tokens":{TOKENS}' in rest and rest.endswith("data: [DONE]\n\n")
        assert process.wait(30 * slowness()) == 0
    finally:
        process.kill()
        process.communicate(timeout=10)
    assert marked(marker) == []


def _run_curl(line: str) -> None:
    shell = ["/bin/sh", "-c", line]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    assert done.returncode == 0, done.stderr
    events = [part for part in done.stdout.split("\n\n") if part]
    assert events[-1] == "data: [DONE]", done.stdout
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert any(choice["delta"].get("content") for choice in choices), done.stdout
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] in (["stop"], ["length"])


def _open_console(line: str) -> None:
    """With the address and the key of the line that `baton demo` prints."""
    found = re.fullmatch(r"Console at (\S+) \(its key: (cat .+)\)\n", line)
    assert found is not None, line
    url, command = found.groups()
    key = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True)
    with urllib.request.urlopen(url, timeout=ANSWER_S) as page:
        assert "<title>Baton console</title>" in page.read().decode()
    headers = {"authorization": f"Bearer {key.stdout.strip()}"}
    request = urllib.request.Request(f"{url}/console/stream", headers=headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as stream:
        whole = json.loads(stream.readline().decode().removeprefix("data: "))
    blocks = [row["blocks"] for row in whole["workers"].values()]
    assert len(blocks) == 2 and all(each["total"] == 2048 for each in blocks)


def _ready_url(process: subprocess.Popen[str]) -> str:
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        found = re.search(r"Ready at (http://\S+)", line)
        if found:
            return found.group(1)
    raise AssertionError("".join(lines))
