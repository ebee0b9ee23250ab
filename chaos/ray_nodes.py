"""A real Ray cluster of several nodes, each in a network namespace with an address of its own.

    head ── gcs, driver     n1, n2, ... ── raylet, actors, supervisors, workers

Each node has its own environment, runtime folder and Ray folder, as a machine has. `kill` is the
loss of a node: all of its processes at once. `kill_raylet` takes Ray from it and leaves the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from baton.deploy.host.authority import Authority, CertificateFiles
from chaos.network import Network, names_of_ended
from chaos.starter import start
from tests.support.waiting import wait_until

HEAD = "head"
GCS_PORT = 6379
START_S = 90.0
JOINED_S = 120.0
RECONNECT_S = "600"  # as KubeRay sets it where the head's state is on Redis
OBJECT_STORE = 80 << 20  # bytes; Ray's least is 75 MiB
RAY = (sys.executable, "-P", "-m", "ray.scripts.scripts")
MARKER = "BATON_TEST_NODE"
FOLDER_PREFIX = f"rn{os.getpid()}-"  # short: paths of sockets have 107 bytes at most
_FOLDER = re.compile(r"rn(\d+)-\w+")
OF_RAY = r"ray::|/ray/|ray\.scripts|ray\.util|baton\.deploy\.cli\.main fleet"


class RayNodes:
    """Nodes of one cluster. `folder` holds logs; sockets are in a folder with a short name. `store`
    is the address of a Redis server that keeps the head's state, so that the nodes outlive it;
    empty: the head has it in memory, and the nodes end a minute after it. Ray's own gRPC uses TLS,
    with a certificate of each node for its address, as in pods of the chart."""

    def __init__(self, network: Network, folder: Path, store: str = "") -> None:
        self._network = network
        self._logs = folder
        self._store = store
        self._short = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._token = self._short / "token"
        self._token.write_text("a token of 32 characters for Ray")
        self._authority = Authority(self._short / "tls")
        self._certificates: dict[str, CertificateFiles] = {}

    @property
    def address(self) -> str:
        return f"{self._network.address(HEAD)}:{GCS_PORT}"

    def start_head(self) -> None:
        """Start a head without cores for actors, and wait until it listens."""
        self._network.add(HEAD)
        options = ("--head", "--port", str(GCS_PORT), "--num-cpus", "0")
        environment = {"RAY_REDIS_ADDRESS": self._store} if self._store else {}
        # a new host has none; with it `ray start` takes the raylets of other nodes for a head
        (self._short / HEAD / "ray_current_cluster").unlink(missing_ok=True)
        self._start(HEAD, environment, *options, "--include-dashboard", "false")
        wait_until(self._head_listens, START_S, every_s=0.1, show=lambda: self.log(HEAD))

    def _head_listens(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((self._network.address(HEAD), GCS_PORT), 1).close()
            return True
        return False

    def start_node(
        self, name: str, environment: Mapping[str, str], resources: Mapping[str, float], cpus: int
    ) -> None:
        """Start a node that joins the head. `environment` is what its machine has."""
        given = ("--resources", json.dumps(dict(resources)), "--num-cpus", str(cpus))
        self._start(name, environment, "--address", self.address, *given)

    def wait_joined(self, names: Sequence[str]) -> None:
        """Wait until these nodes, which start for the first time, have joined the head."""
        wait_until(
            lambda: all("Ray runtime started" in self.log(name) for name in names),
            JOINED_S,
            every_s=0.2,
            show=lambda: "\n".join(map(self.log, names)),
        )

    def in_node(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: str
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node, and return its process."""
        site = self._network.add(name)
        everything = self._environment(name) | dict(environment)
        with open(self._logs / f"{log}.log", "ab") as file:
            process = start([*site.prefix, *command], everything, file)
        if (before := self._processes.get(log)) is not None:
            before.wait(10)  # it was killed
        self._processes[log] = process
        return process

    @property
    def machine(self) -> str:
        return self._network.machine

    def reserve(self, name: str) -> str:
        """Make the namespace of a node that is to be started, and return its address."""
        self._network.add(name)
        return self._network.address(name)

    def address_of(self, name: str) -> str:
        return self._network.address(name)

    def kill(self, name: str) -> None:
        """Kill every process of a node at once."""
        while found := self.processes(name):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)  # the kernel ends them after the signal
        self._processes.pop(name).wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to every process of a node."""
        for pid in self.processes(name):
            os.kill(pid, number)

    def kill_programs(self, name: str, pattern: str) -> int:
        """Kill those processes of a node whose command line matches; how many there were."""
        found = [pid for pid, line in self.processes(name).items() if re.search(pattern, line)]
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return len(found)

    def kill_ray(self) -> None:
        """Kill everything of Ray on all nodes, drivers included; supervisors and workers live."""
        names = [name for name in self._network.names if self.processes(name)]
        while any([self.kill_programs(name, OF_RAY) for name in names]):
            time.sleep(0.05)  # the kernel ends them after the signal

    def processes(self, name: str) -> dict[int, str]:
        """Return the command lines of a node's live processes."""
        marker = f"{MARKER}={self._short.name}-{name}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and marker in (entry / "environ").read_bytes().split(b"\0"):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = line
        return found

    def log(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def worker_log(self, node: str, worker: str) -> str:
        files = self._runtime(node).glob(f"baton/ray-*/{worker}.log")
        return "\n".join(path.read_text() for path in files)

    def files_with(self, text: str) -> list[str]:
        """Return the files of Ray and of the supervisors that hold a text."""
        return [
            str(path)
            for path in self._short.rglob("*")
            if path.is_file() and path != self._token and text.encode() in path.read_bytes()
        ]

    def close(self) -> None:
        for name in [*self._processes]:
            node = name if self.processes(name) else None
            self._processes[name].kill()
            if node:
                self.kill(node)
            else:
                self._processes[name].wait(10)
        shutil.rmtree(self._short, ignore_errors=True)

    def _start(self, name: str, environment: Mapping[str, str], *options: str) -> None:
        command = [*RAY, "start", *options, "--node-ip-address", self._network.address(name)]
        command += ["--object-store-memory", str(OBJECT_STORE), "--disable-usage-stats", "--block"]
        command += ["--temp-dir", str(self._short / name), "--include-log-monitor", "false"]
        self._runtime(name).mkdir(mode=0o700, exist_ok=True)
        self.in_node(name, tuple(command), environment, name)

    def _runtime(self, name: str) -> Path:
        return self._short / f"run-{name}"

    def _environment(self, name: str) -> dict[str, str]:
        if name not in self._certificates:
            address = self._network.address(name)
            self._certificates[name] = self._authority.issue(name, address)
        files = self._certificates[name]
        return os.environ | {
            "RAY_USE_TLS": "1",
            "RAY_TLS_CA_CERT": str(files.authority),
            "RAY_TLS_SERVER_CERT": str(files.certificate),
            "RAY_TLS_SERVER_KEY": str(files.key),
            MARKER: f"{self._short.name}-{name}",
            "XDG_RUNTIME_DIR": str(self._runtime(name)),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "UCX_TLS": "tcp",
            "RAY_gcs_rpc_server_reconnect_timeout_s": RECONNECT_S if self._store else "60",
        }


@contextlib.contextmanager
def ray_nodes(folder: Path) -> Iterator[RayNodes]:
    """A cluster with a head and no other node; everything is gone at the end."""
    with Network() as network:
        nodes = RayNodes(network, folder)
        try:
            nodes.start_head()
            yield nodes
        finally:
            nodes.close()


def remove_leftovers(parent: Path | None = None) -> list[str]:
    """Remove the folders of killed runs below `parent` (None: that of temporary files), and return
    their names."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    removed = list(names_of_ended(parent, _FOLDER))
    for name in removed:
        shutil.rmtree(parent / name, ignore_errors=True)
    return removed
