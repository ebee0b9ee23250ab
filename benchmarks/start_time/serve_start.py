"""One start of `baton serve` from the code of a checkout: how long it takes, and how much CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from baton.models.embedded import embedded_model

START_S = 600.0  # with kernels to compile
STOP_S = 60.0
COMMAND = ("-P", "-m", "baton.deploy.cli.main", "serve", "--launcher=process", "--port=0")
READY = b"Ready at "


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds until a fleet was ready, and CPU seconds of its processes."""

    wall_s: float
    cpu_s: float


def measured_start(checkout: Path) -> Start:
    """Start `baton serve` of a checkout, and end it once it is ready."""
    with tempfile.TemporaryDirectory(prefix="baton-start-") as text:
        environment = {"PYTHONPATH": str(_path(checkout)), "XDG_RUNTIME_DIR": text}
        began_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *COMMAND, str(embedded_model())],
            env=os.environ | environment,
            cwd=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            wall_s = _ready_s(process) - began_s
            return Start(wall_s, _cpu_s(text))
        finally:
            _stop(process)


def _path(checkout: Path) -> Path:
    """Return a folder with the checkout's package `baton`, made when missing. It stays: compiled
    kernels are kept by the path of their source. Its links name the real folders, since the
    checkout may be given by a link that does not stay."""
    checkout = checkout.resolve()
    path = checkout / "build" / "start_time"
    (path / "baton").mkdir(parents=True, exist_ok=True)
    for name in _folders(checkout):
        link = path / "baton" / name
        if link.is_symlink() and link.readlink() != checkout / name:
            link.unlink()
        if not link.is_symlink():
            link.symlink_to(checkout / name)
    return path


def _folders(checkout: Path) -> set[str]:
    """Return the folders that a checkout's package `baton` consists of."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    return {name.split(".")[1] for name in project["tool"]["setuptools"]["packages"]}


def _ready_s(process: subprocess.Popen[bytes]) -> float:
    """Return when the process has written that it is ready. Raises RuntimeError if it ends before,
    or is ended after START_S."""
    assert process.stdout is not None
    limit = threading.Timer(START_S, process.kill)
    limit.start()
    written: list[bytes] = []
    try:
        for line in process.stdout:
            if line.startswith(READY):
                return time.perf_counter()
            written.append(line)
    finally:
        limit.cancel()
    raise RuntimeError(f"baton serve did not start:\n{b''.join(written[-40:]).decode()}")


def _cpu_s(runtime_folder: str) -> float:
    """Return the CPU seconds of all processes with this folder in their environment, and of those
    that they have waited for."""
    mark, ticks = f"XDG_RUNTIME_DIR={runtime_folder}\0".encode(), 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if mark in (folder / "environ").read_bytes():
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, after_name[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
