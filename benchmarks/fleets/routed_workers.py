"""A real router process before hash workers, for benchmarks: started as `baton serve` starts one.

The workers are those of hash_workers.py, in one process of their own. The creator of a
`RoutedWorkers` owns the processes; `close` ends them.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from baton.deploy.host.instance import admin_address_file, grpc_address_file
from baton.models.embedded import embedded_model

MODEL = "baton-tiny"
START_S = 120.0
ROOT = Path(__file__).parents[2]
COMMON = ("security.tls=off", "telemetry.log_level=error")  # settings of every process


class RoutedWorkers:
    """`workers` are arguments of the workers' `module`, `settings` the router's
    `section.key=value`, `entry` what Python runs in place of `-m`, with the module after it. The
    router is started by `start_router`; with an `admin_key` it has an admin port."""

    def __init__(
        self,
        workers: Sequence[str],
        settings: Sequence[str] = (),
        entry: Sequence[str] = (),
        admin_key: str = "",
        module: str = "benchmarks.fleets.hash_workers",
    ) -> None:
        self._entry = [*(entry or ["-m"])]
        self._folder = tempfile.TemporaryDirectory(prefix="baton-benchmark-")
        self._base = Path(self._folder.name)
        self._model = embedded_model()
        self._settings = [*COMMON, "router.port=0", *settings]
        self._admin = ["--admin-port=0"] if admin_key else []
        self.token, self.registry = secrets.token_hex(16), self._base / "registry"
        secret = {"BATON_TOKEN": self.token, "BATON_ADMIN_KEY": admin_key}
        self._environment = os.environ | secret
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start_workers(workers, module)

    def _start_workers(self, workers: Sequence[str], module: str) -> None:
        vocabulary = json.loads((self._model / "config.json").read_text())["vocab_size"]
        command = [*self._entry, module, f"--vocabulary={vocabulary}"]
        self._start("workers", [*command, f"--registry={self._base / 'registry'}", *workers])

    def start_router(self) -> str:
        """host:port, once the router listens. Raises RuntimeError if it does not come up."""
        address = self._base / "address"
        address.unlink(missing_ok=True)
        command = [*self._entry, "baton.deploy.cli.main", "router", "--model", str(self._model)]
        command += ["--model-name", MODEL, "--registry", str(self._base / "registry")]
        command += ["--address-file", str(address), *self._admin]
        command += [f"--set={setting}" for setting in self._settings]
        router = self._start("router", command)
        deadline = time.monotonic() + START_S
        while not (address.exists() and address.read_text()):
            if router.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the router did not start:\n{self.log('router')}")
            time.sleep(0.002)  # a router announces itself in a file
        return address.read_text().strip()

    @property
    def grpc_address(self) -> str:
        """host:port of a router that was started with `router.grpc_port`."""
        return grpc_address_file(self._base / "address").read_text().strip()

    @property
    def admin_address(self) -> str:
        """host:port of the admin port of a router that has one."""
        return admin_address_file(self._base / "address").read_text().strip()

    def kill_router(self) -> None:
        """Kill the router without notice to any peer."""
        router = self._processes.pop()
        router.kill()
        router.wait(10)

    def wait_workers(self, count: int) -> None:
        """Wait until so many have announced themselves. Raises RuntimeError if they do not."""
        deadline = time.monotonic() + START_S
        while len(list((self._base / "registry").glob("*.worker"))) < count:
            if self._processes[0].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the workers did not start:\n{self.log('workers')}")
            time.sleep(0.05)  # workers announce themselves in files

    def cpu_s(self) -> float:
        """Return the processor time that all processes have used so far, in seconds."""
        return sum(map(_cpu_s, self._processes))

    def router_cpu_s(self) -> float:
        """Return the processor time that the router has used so far, in seconds."""
        return _cpu_s(self._processes[-1])

    def log(self, name: str) -> str:
        return (self._base / f"{name}.log").read_text()[-3000:]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self._folder.cleanup()

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with open(self._base / f"{name}.log", "ab") as log:
            started = subprocess.Popen(
                [sys.executable, *command],
                env=self._environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        self._processes.append(started)
        return started


class RoutedModelWorkers(RoutedWorkers):
    """The same with a prefill and a decode worker that compute baton-tiny, a thread each."""

    def __init__(self, entry: Sequence[str] = (), settings: Sequence[str] = ()) -> None:
        super().__init__([], settings, entry, module="baton.deploy.cli.main")

    def _start_workers(self, workers: Sequence[str], module: str) -> None:
        for role in ("prefill", "decode"):
            command = [*self._entry, module, "worker", "--role", role, "--worker-id", f"{role}-0"]
            command += ["--model", str(self._model), "--registry", str(self._base / "registry")]
            command += [f"--set={setting}" for setting in (*self._settings, "worker.threads=1")]
            self._start("workers", command)


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
