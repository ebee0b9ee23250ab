"""`baton serve` on one host where the package redis cannot be imported, in any of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from baton.models.embedded import embedded_model
from chaos.starter import start
from tests.support.machine_speed import slowness
from tests.support.waiting import wait_until

START_S = 240.0 * slowness()
BATON = (sys.executable, "-P", "-m", "baton.deploy.cli.main")
# An import of redis is written down and fails, in each process that inherits PYTHONPATH.
BLOCKED = """
import os, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("redis", "valkey"):
            with open(os.environ["BATON_TEST_IMPORTS"], "a") as written:
                written.write(f"{os.getpid()} {name} {sys.argv}\\n")
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
with open(os.environ["BATON_TEST_PROCESSES"], "a") as written:
    written.write(" ".join(sys.orig_argv) + "\\n")
"""


@pytest.mark.nightly
def test_serve_answers_and_never_imports_redis(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    imports, processes = tmp_path / "imports", tmp_path / "processes"
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "BATON_TEST_IMPORTS": str(imports),
        "BATON_TEST_PROCESSES": str(processes),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    command = [*BATON, "serve", str(embedded_model()), "--launcher=process", "--port=0"]
    log = tmp_path / "serve.log"
    with open(log, "wb") as opened:
        serve = start(command, os.environ | environment, opened)
    try:
        wait_until(lambda: ready_or_ended(serve, log), START_S, every_s=0.1, show=log.read_text)
        assert serve.poll() is None, log.read_text()
        (line,) = [each for each in log.read_text().splitlines() if each.startswith("Ready at ")]
        url = line.split()[2]
        asked = {"model": embedded_model().name, "max_tokens": 8}
        asked |= {"messages": [{"role": "user", "content": "Hello"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"], answer.text
    finally:
        serve.send_signal(signal.SIGINT)
        try:
            serve.wait(60)
        except subprocess.TimeoutExpired:
            serve.kill()
            serve.wait()
    started = processes.read_text()
    for role in (" router ", "--role prefill", "--role decode", " serve "):
        assert role in started, started  # it was blocked there
    assert not imports.exists(), imports.read_text()


def ready_or_ended(serve: subprocess.Popen[bytes], log: Path) -> bool:
    return "Ready at " in log.read_text() or serve.poll() is not None
