"""A fleet on a Ray cluster of several nodes, each in a network namespace, with Redis between them.

The driver, or `baton serve`, runs beside Ray's head; the router of a fleet without `baton serve`
runs on this machine. Secrets are in the nodes' environments alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from baton.deploy.control import orders
from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.models.embedded import embedded_model
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from chaos.ray_nodes import HEAD, RayNodes, ray_nodes
from chaos.redis_server import RedisServer, running_server
from chaos.starter import start
from tests.support.redis_server import required_binary
from tests.support.waiting import wait_until

BATON = (sys.executable, "-P", "-m", "baton.deploy.cli.main")
TOKEN = "the token that only nodes know"
PASSWORD = "the-password-of-redis"
ADMIN_PORT = 9400  # of the driver
ROUTER_PORT = 8000
RANK = "engine.ranks"  # in the command line of a rank
API_KEY = "a-key-of-clients"  # of the router that other hosts reach
KEY = {"Authorization": f"Bearer {API_KEY}"}
QUESTION = "Name three rivers, please, and say where each begins."
TOKENS = 300
CHANGE_S = 120.0  # within which processes of a fleet do what is expected
JOINED = "Ray runtime started"  # in the log of a node
GROUPS = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
groups = ray.util.placement_group_table().values()
print(json.dumps({e["name"]: len(e["bundles"]) for e in groups if e["state"] != "REMOVED"}))
"""  # how many bundles each placement group has
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
        self.model = "small"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._run("authority", "create", "--folder", str(folder / "authority"))

    def add_node(
        self, name: str, resources: dict[str, float], cpus: int = 2, **environment: str
    ) -> None:
        host = self.nodes.reserve(name)
        before = self.nodes.log(name).count(JOINED)
        given = self._secrets(name, "worker", host) | environment
        self.nodes.start_node(name, given, resources, cpus)
        self.until(lambda: self.nodes.log(name).count(JOINED) > before)

    def start_driver(self, *options: str) -> subprocess.Popen[bytes]:
        command = [*BATON, "fleet", "--ray-address", self.nodes.address, *options]
        command += ["--registry", self.registry, *self._flags(SIZES)]
        command += ["--admin-port", str(ADMIN_PORT)]
        environment = self._secrets("driver", "client", None)
        environment["BATON_WORKER__HOST"] = self.nodes.address_of(HEAD)
        return self.nodes.in_node(HEAD, command, environment, "driver")

    def start_serve(self, *options: str) -> subprocess.Popen[bytes]:
        """Start `baton serve` beside the head; its router is this fleet's."""
        host = self.nodes.address_of(HEAD)
        command = [*BATON, "serve", "--ray-address", self.nodes.address, "--host", host, *options]
        command += ["--port", str(ROUTER_PORT), "--registry", self.registry, *self._flags(SIZES)]
        self.url, self.model = f"http://{host}:{ROUTER_PORT}", embedded_model().name
        secrets = self._secrets("router", "router", None) | {"BATON_ROUTER__API_KEYS": API_KEY}
        return self.nodes.in_node(HEAD, command, secrets, "driver")

    def audit(self) -> dict[str, Any]:
        """Return the driver's view of the fleet."""
        url = f"http://{self.nodes.address_of(HEAD)}:{ADMIN_PORT}/audit"
        found: dict[str, Any] = httpx.get(url, timeout=10).json()
        return found

    def groups(self) -> dict[str, int]:
        """Return how many bundles each placement group of Ray has, by worker id."""
        command = [sys.executable, "-P", "-c", GROUPS, self.nodes.address]
        before = len(self.nodes.log("groups"))
        done = self.nodes.in_node(HEAD, command, {}, "groups").wait(120)
        said = self.nodes.log("groups")[before:]
        assert done == 0, said
        found: dict[str, int] = json.loads(said.splitlines()[-1])
        return {name.removeprefix("baton-baton/"): count for name, count in found.items()}

    def metric(self, name: str) -> float:
        """Return a value of the driver's metrics."""
        return _metric(f"http://{self.nodes.address_of(HEAD)}:{ADMIN_PORT}/metrics", name)

    def start_router(self) -> None:
        address = self.folder / "router.address"
        command = [*BATON, "router", "--model", str(embedded_model()), "--model-name", "small"]
        command += ["--address-file", str(address), "--registry", self.registry]
        command += self._flags(SIZES | {"router.port": "0"})
        environment = os.environ | self._secrets("router", "router", None)
        with open(self.folder / "router.log", "ab") as log:
            self._processes.append(start(command, environment, log))
        self.until(address.exists)
        self.url = f"http://{address.read_text().strip()}"

    def start_controller(self, *options: str) -> subprocess.Popen[bytes]:
        """Start `baton controller` on this machine, with an objective that every answer meets."""
        command = [*BATON, "controller", "--registry", self.registry, "--set=slo.ttft_s=100"]
        environment = os.environ | self._secrets("controller", "client", None)
        with open(self.folder / "controller.log", "ab") as log:
            self._processes.append(start([*command, *options], environment, log))
        return self._processes[-1]

    def linked(self) -> dict[str, int]:
        """Return how many workers of each role the router is linked to."""
        try:
            answer = httpx.get(f"{self.url}/readyz", timeout=10)
        except httpx.TransportError:
            return {}
        return dict(answer.json()["workers"]) if answer.status_code == 200 else {}

    def until_linked(self, **workers: int) -> None:
        self.until(lambda: self.linked() == workers)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true of the processes here."""
        wait_until(condition, CHANGE_S, every_s=0.2, show=self.logs)

    def ask(self, tokens: int = 12) -> str:
        """Return a greedy answer."""
        asked = body(tokens) | {"model": self.model}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=asked, headers=KEY, timeout=120)
        assert answer.status_code == 200, answer.text
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content

    def asking(self) -> Asking:
        """Ask again and again until the context ends; every answer must be this one."""
        return Asking(self, self.ask())

    def streams(self, count: int, tokens: int) -> Streams:
        return Streams(self.url, count, tokens)

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the rows of `baton cluster status`, by worker id."""
        environment = self._secrets("operator", "client", None)
        command = [*BATON, "cluster", "status", "--json", "--registry", self.registry]
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=120
        )
        found = json.loads(done.stdout)
        assert found["registry_state"] == "readable", done.stderr
        return {row["worker_id"]: row for row in found["workers"]}

    def command_on(self, node: str, *command: str) -> str:
        """Return what a command of `baton` prints on a node, as the user of the node."""
        return self._run_on(node, {}, command)

    def operator_on(self, node: str, *command: str) -> str:
        """Return the same with an operator's certificate and the registry's location."""
        secrets = self._secrets("operator", "client", None)
        return self._run_on(node, secrets, (*command, "--registry", self.registry))

    def _run_on(self, node: str, environment: dict[str, str], command: Sequence[str]) -> str:
        log = f"{command[0]}-{node}"
        before = len(self.nodes.log(log))
        done = self.nodes.in_node(node, [*BATON, *command], environment, log).wait(120)
        said = self.nodes.log(log)[before:]
        assert done == 0, f"{' '.join(command)} on {node}: {said}\n{self.logs()}"
        return said

    def worker_metric(self, worker: str, name: str) -> float:
        """Return a value of a worker's metrics."""
        registry = RegistryConfig(self.registry, PASSWORD)
        secrets = ClusterSecrets((TOKEN,), TOKEN)
        cluster = orders.Cluster("test", registry, secrets, SecurityConfig(tls="off"))
        (record,) = [each for each in cluster.workers() if each.worker_id == worker]
        return _metric(f"http://{record.admin_address}/metrics", name)

    def host_of(self, worker: str) -> str:
        address: str = self.status()[worker]["address"]
        return address.rpartition(":")[0]

    def workers_on(self, node: str) -> list[int]:
        """Return the pids of `baton worker` on a node."""
        found = self.nodes.processes(node).items()
        return [pid for pid, line in found if "baton.deploy.cli.main worker" in line]

    def ranks_on(self, node: str) -> int:
        """Return how many ranks a node has, without leaders."""
        return sum(RANK in line for line in self.nodes.processes(node).values())

    def logs(self) -> str:
        names = ("driver", "router", "controller", HEAD, "n1", "n2", "n3")
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


class Asking:
    """Asks in a thread while the context lasts. `answers` are other than `expected` or errors."""

    def __init__(self, fleet: Fleet, expected: str) -> None:
        self.expected = expected
        self.asked = 0
        self.wrong: list[str] = []
        self._fleet = fleet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                answer = self._fleet.ask()
            except (AssertionError, httpx.HTTPError) as error:
                answer = repr(error)
            self.asked += 1
            if answer != self.expected:
                self.wrong.append(answer)


class Streams:
    """Long greedy streams, side by side. `texts` has each one's answer once it has ended well."""

    def __init__(self, url: str, count: int, tokens: int) -> None:
        self.begun = threading.Semaphore(0)
        self.texts: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, args=(url, tokens)) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self.begun.acquire(timeout=60)

    def end(self) -> list[str]:
        for thread in self._threads:
            thread.join(120)
        return self.texts

    def _read(self, url: str, tokens: int) -> None:
        request = body(tokens) | {"stream": True, "ignore_eos": True}
        text, ended, begun = "", False, False
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=request, timeout=120
        ) as answer:
            for line in answer.iter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: ")).get("choices", [])
                    text += "".join(each["delta"].get("content") or "" for each in choices)
                if text and not begun:
                    begun = True
                    self.begun.release()
        if ended:
            self.texts.append(text)


def body(tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": "small", "messages": messages, "temperature": 0, "max_tokens": tokens}


def _metric(url: str, name: str) -> float:
    lines = httpx.get(url, timeout=10).text.splitlines()
    (found,) = [line for line in lines if line.startswith(f"{name} ")]
    return float(found.split()[1])


@contextlib.contextmanager
def running_fleet(folder: Path) -> Iterator[Fleet]:
    """A head, a Redis server and no node yet; everything is gone at the end."""
    options = ("--bind", "0.0.0.0", "--requirepass", PASSWORD)
    with (
        running_server(folder, required_binary(), *options) as server,
        ray_nodes(folder) as nodes,
    ):
        made = Fleet(folder, nodes, server)
        try:
            yield made
        finally:
            made.close()
