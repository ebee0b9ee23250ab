"""`baton serve` as a process over the stand-in jobs of `stand_in_jobs.py`, and a model for it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from baton.deploy.host.instance import live_instances, read_status
from baton.deploy.serve.plan import FLEET_JOB
from tests.support.machine_speed import slowness

STAND_IN_JOBS = Path(__file__).with_name("stand_in_jobs.py")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 64,
}


class StandInServe:
    """A running stand-in serve and what it has printed."""

    def __init__(self, model: Path, launcher: str, *rest: str, port: int = 0, fault: str = ""):
        timeout_s = (5.0 if fault == "mute" else 120.0) * slowness()
        environment = os.environ | {"STAND_IN": fault, "STAND_IN_TIMEOUT_S": f"{timeout_s}"}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(STAND_IN_JOBS),
                "serve",
                str(model),
                str(port),
                launcher,
                *rest,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.seen = ""

    def until(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self.seen += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no {pattern!r} in:\n{self.seen}\n{self.process.communicate()[1]}")

    def folder(self) -> Path:
        (folder,) = live_instances()
        return folder

    def report_next(self) -> None:
        """Let the stand-in driver of workers on other nodes make its second report."""
        driver = read_status(self.folder(), FLEET_JOB)
        assert driver is not None
        os.kill(driver.pid, signal.SIGUSR1)

    def interrupt(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        return self.finish()

    def finish(self) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=250 * slowness())
        self.seen += out
        return self.process.returncode, err


def write_stand_in_model(folder: Path) -> None:
    """Write a model that passes the checks made without torch; nothing reads its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
