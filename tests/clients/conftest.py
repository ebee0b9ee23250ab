"""The fleet that `make demo` starts, and the programs of third-party clients against it.

Each client lives in a virtual environment of its own under build/clients (`make clients`): two of
them pin versions of one package that exclude each other. A test is skipped, by name, where the
environment of its client is absent.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.machine_speed import slowness

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / "build" / "clients"
DEMO = [sys.executable, "-P", "-m", "baton.deploy.cli.main", "demo", "--port", "0"]
DEMO += ["--launcher", "process"]


@pytest.fixture(scope="session")
def demo_url() -> Iterator[str]:
    """The address of the fleet of `make demo`: one prefill and one decode worker, baton-tiny."""
    with TemporaryDirectory() as folder:
        process = subprocess.Popen(
            DEMO,
            env=os.environ | {"XDG_RUNTIME_DIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield _ready_url(process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=30 * slowness())
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _ready_url(process: subprocess.Popen[str]) -> str:
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("Ready at "):
            return line.split()[2]
    raise AssertionError("".join(lines))


@pytest.fixture(scope="session")
def run_client(demo_url: str) -> Callable[..., str]:
    """`run_client(environment, *command)`: what a command of that client's environment prints. A
    command that ends in `.py` or `.mjs` is a program of this folder; `{url}` is the server."""

    def run(environment: str, *command: str, timeout_s: float = 100) -> str:
        if not (ENVIRONMENTS / environment / ".installed").exists():
            pytest.skip(
                f"build/clients/{environment} is absent: run `make build/clients/{environment}`"
            )
        name, *rest = [part.replace("{url}", demo_url) for part in command]
        done = subprocess.run(
            [*_program(ENVIRONMENTS / environment, name, demo_url), *rest],
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s * slowness(),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def _program(environment: Path, name: str, url: str) -> list[str]:
    source = HERE / "programs" / name
    if name.endswith(".py"):
        return [str(environment / "bin" / "python"), str(source), url]
    if name.endswith(".mjs"):  # node looks for packages beside a program
        return [str(environment / "bin" / "node"), shutil.copy(source, environment / name), url]
    return [str(environment / "bin" / name)]


def _environment() -> dict[str, str]:
    """Nothing of a client looks for its vendor's hosts, a model hub or a key of the user's."""
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
    return os.environ | offline | {"OPENAI_API_KEY": "none", "HF_DATASETS_OFFLINE": "1"}
