"""A fleet on a Ray cluster of several nodes, each in a network namespace, with Redis between them.

The driver runs beside Ray's head, the router on this machine. Secrets are in the nodes'
environments alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.models.embedded import embedded_model
from chaos.network import unavailable
from chaos.starter import start
from tests.support.ray_nodes import HEAD, RayNodes, ray_nodes, until
from tests.support.redis_server import RedisServer, required_binary, running_server

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}"),
]

BATON = (sys.executable, "-P", "-m", "baton.deploy.cli.main")
TOKEN = "the token that only nodes know"
PASSWORD = "the-password-of-redis"
QUESTION = "Name three rivers, please, and say where each begins."
SIZES = {
    "pool.blocks": "256",
    "worker.dtype": "float32",
    "worker.threads": "1",
    "router.placement": "disaggregated",
}


class Fleet:
    """A Ray cluster, a Redis server, a router and the driver of a fleet."""

    def __init__(self, folder: Path, nodes: RayNodes, server: RedisServer) -> None:
        self.folder = folder
        self.nodes = nodes
        self.registry = f"redis://{nodes.machine}:{server.port}/0"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._run("authority", "create", "--folder", str(folder / "authority"))

    def add_node(self, name: str, resources: dict[str, float], cpus: int = 2) -> None:
        host = self.nodes.reserve(name)
        self.nodes.start_node(name, self._secrets(name, "worker", host), resources, cpus)

    def start_driver(self, *options: str) -> subprocess.Popen[bytes]:
        command = [*BATON, "fleet", "--ray-address", self.nodes.address, *options]
        command += ["--registry", self.registry, *self._flags(SIZES)]
        secrets = self._secrets("driver", "client", None)
        return self.nodes.in_node(HEAD, command, secrets, "driver")

    def start_router(self) -> None:
        address = self.folder / "router.address"
        command = [*BATON, "router", "--model", str(embedded_model()), "--model-name", "small"]
        command += ["--address-file", str(address), "--registry", self.registry]
        command += self._flags(SIZES | {"router.port": "0"})
        environment = os.environ | self._secrets("router", "router", None)
        with open(self.folder / "router.log", "ab") as log:
            self._processes.append(start(command, environment, log))
        until(address.exists, lambda: (self.folder / "router.log").read_text())
        self.url = f"http://{address.read_text().strip()}"

    def linked(self) -> dict[str, int]:
        """Return how many workers of each role the router is linked to."""
        try:
            answer = httpx.get(f"{self.url}/readyz", timeout=10)
        except httpx.TransportError:
            return {}
        return dict(answer.json()["workers"]) if answer.status_code == 200 else {}

    def until_linked(self, **workers: int) -> None:
        until(lambda: self.linked() == workers, self.logs)

    def ask(self, tokens: int = 12) -> str:
        """Return a greedy answer."""
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body(tokens), timeout=120)
        assert answer.status_code == 200, answer.text
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the rows of `baton cluster status`, by worker id."""
        environment = self._secrets("operator", "client", None)
        text = self._run("cluster", "status", "--json", "--registry", self.registry, **environment)
        return {row["worker_id"]: row for row in json.loads(text)["workers"]}

    def host_of(self, worker: str) -> str:
        address: str = self.status()[worker]["address"]
        return address.rpartition(":")[0]

    def workers_on(self, node: str) -> list[int]:
        """Return the pids of `baton worker` on a node."""
        found = self.nodes.processes(node).items()
        return [pid for pid, line in found if "baton.deploy.cli.main worker" in line]

    def logs(self) -> str:
        names = ("driver", "router", HEAD, "n1", "n2", "n3")
        texts = {name: (self.folder / f"{name}.log") for name in names}
        parts = [f"{n}:\n{p.read_text()[-3000:]}" for n, p in texts.items() if p.exists()]
        workers = ("prefill-0", "decode-0", "decode-1")
        for node in ("n1", "n2", "n3"):
            parts += [f"{node} {w}:\n{self.nodes.worker_log(node, w)[-2000:]}" for w in workers]
        return "\n".join(parts)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _secrets(self, name: str, role: str, host: str | None) -> dict[str, str]:
        """Return the environment of a machine: token, password and certificate."""
        out = self.folder / "certificates" / name
        command = ["issue", "--folder", str(self.folder / "authority"), "--out", str(out)]
        command += ["--role", role, "--name", name, *(("--host", host) if host else ())]
        settings = dict(each.split("=", 1) for each in self._run("authority", *command).split())
        files = {f"BATON_{k.replace('.', '__').upper()}": v for k, v in settings.items()}
        return files | {"BATON_TOKEN": TOKEN, "BATON_REGISTRY__PASSWORD": PASSWORD}

    def _run(self, *command: str, **environment: str) -> str:
        return subprocess.check_output(
            [*BATON, *command], text=True, timeout=120, env=os.environ | environment
        )

    @staticmethod
    def _flags(settings: dict[str, str]) -> list[str]:
        return [f"--set={name}={value}" for name, value in settings.items()]


def body(tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": "small", "messages": messages, "temperature": 0, "max_tokens": tokens}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    options = ("--bind", "0.0.0.0", "--requirepass", PASSWORD)
    with (
        running_server(tmp_path, required_binary(), *options) as server,
        ray_nodes(tmp_path) as nodes,
    ):
        made = Fleet(tmp_path, nodes, server)
        try:
            yield made
        finally:
            made.close()


def test_workers_are_placed_by_role_and_found_again(fleet: Fleet) -> None:
    """Each role on its node; a driver, an actor and a worker are killed; the end leaves nothing."""
    fleet.add_node("n1", {"baton-prefill": 1})
    fleet.add_node("n2", {"baton-decode": 1})
    driver = fleet.start_driver("--by-role")
    fleet.start_router()
    fleet.until_linked(prefill=1, decode=1)
    first = fleet.ask()
    rows = fleet.status()
    assert fleet.host_of("prefill-0") == fleet.nodes.address_of("n1")
    assert fleet.host_of("decode-0") == fleet.nodes.address_of("n2")
    assert fleet.nodes.files_with(TOKEN) == fleet.nodes.files_with(PASSWORD) == []

    driver.send_signal(signal.SIGKILL)
    driver.wait(10)
    assert fleet.nodes.kill_programs("n2", "ray::NodeActor") == 1
    driver = fleet.start_driver("--by-role")
    until(lambda: fleet.nodes.log("driver").count("worker registered") == 4, fleet.logs)
    after = fleet.status()
    assert {n: r["boot_id"] for n, r in after.items()} == {n: r["boot_id"] for n, r in rows.items()}
    assert fleet.ask() == first

    (worker,) = fleet.workers_on("n2")
    os.kill(worker, signal.SIGKILL)
    until(lambda: fleet.workers_on("n2") not in ([], [worker]), fleet.logs)
    fleet.until_linked(prefill=1, decode=1)
    assert fleet.ask() == first

    driver.send_signal(signal.SIGTERM)
    assert driver.wait(90) == 0, fleet.logs()
    assert fleet.workers_on("n1") == fleet.workers_on("n2") == []
    assert fleet.nodes.files_with(TOKEN) == fleet.nodes.files_with(PASSWORD) == []
