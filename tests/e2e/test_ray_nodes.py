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
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.models.embedded import embedded_model
from chaos.network import unavailable
from chaos.ray_nodes import HEAD, RayNodes, ray_nodes, until
from chaos.redis_server import RedisServer, running_server
from chaos.starter import start
from tests.support.redis_server import required_binary

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}"),
]

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
JOINED = "Ray runtime started"  # in the log of a node
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

    def add_node(self, name: str, resources: dict[str, float], cpus: int = 2) -> None:
        host = self.nodes.reserve(name)
        before = self.nodes.log(name).count(JOINED)
        self.nodes.start_node(name, self._secrets(name, "worker", host), resources, cpus)
        until(lambda: self.nodes.log(name).count(JOINED) > before, self.logs)

    def start_driver(self, *options: str) -> subprocess.Popen[bytes]:
        command = [*BATON, "fleet", "--ray-address", self.nodes.address, *options]
        command += ["--registry", self.registry, *self._flags(SIZES)]
        command += ["--admin-port", str(ADMIN_PORT)]
        environment = self._secrets("driver", "client", None)
        environment["BATON_WORKER__HOST"] = self.nodes.address_of(HEAD)
        return self.nodes.in_node(HEAD, command, environment, "driver")

    def start_serve(self) -> subprocess.Popen[bytes]:
        """Start `baton serve` beside the head; its router is this fleet's."""
        host = self.nodes.address_of(HEAD)
        command = [*BATON, "serve", "--ray-address", self.nodes.address, "--host", host]
        command += ["--port", str(ROUTER_PORT), "--registry", self.registry, *self._flags(SIZES)]
        self.url, self.model = f"http://{host}:{ROUTER_PORT}", embedded_model().name
        secrets = self._secrets("router", "router", None) | {"BATON_ROUTER__API_KEYS": API_KEY}
        return self.nodes.in_node(HEAD, command, secrets, "driver")

    def audit(self) -> dict[str, Any]:
        """Return the driver's view of the fleet."""
        url = f"http://{self.nodes.address_of(HEAD)}:{ADMIN_PORT}/audit"
        found: dict[str, Any] = httpx.get(url, timeout=10).json()
        return found

    def metric(self, name: str) -> float:
        """Return a value of the driver's metrics."""
        url = f"http://{self.nodes.address_of(HEAD)}:{ADMIN_PORT}/metrics"
        lines = httpx.get(url, timeout=10).text.splitlines()
        (found,) = [line for line in lines if line.startswith(f"{name} ")]
        return float(found.split()[1])

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
    until(lambda: fleet.metric('baton_adopted_workers{role="decode"}') == 1, fleet.logs)
    assert fleet.metric("baton_ray_nodes") == 3

    (worker,) = fleet.workers_on("n2")
    os.kill(worker, signal.SIGKILL)
    until(lambda: fleet.workers_on("n2") not in ([], [worker]), fleet.logs)
    fleet.until_linked(prefill=1, decode=1)
    assert fleet.ask() == first
    until(lambda: fleet.metric('baton_worker_restarts_total{reason="ended"}') == 1, fleet.logs)
    assert fleet.metric('baton_wanted_workers{role="decode"}') == 1
    assert fleet.metric('baton_registered_workers{role="decode"}') == 1
    assert fleet.metric('baton_adopted_workers{role="decode"}') == 0

    driver.send_signal(signal.SIGTERM)
    assert driver.wait(90) == 0, fleet.logs()
    assert fleet.workers_on("n1") == fleet.workers_on("n2") == []
    assert fleet.nodes.files_with(TOKEN) == fleet.nodes.files_with(PASSWORD) == []


def test_the_ranks_of_a_worker_are_on_one_node(fleet: Fleet) -> None:
    """Two ranks with a core each: the node with one core is not taken."""
    fleet.add_node("n1", {"baton-decode": 1}, cpus=1)
    fleet.add_node("n2", {"baton-decode": 1}, cpus=2)
    driver = fleet.start_driver(
        "--by-role", "--prefill=0", "--decode=2", "--cpus=1", "--set=worker.tp=2"
    )
    until(lambda: fleet.ranks_on("n2") == 1, fleet.logs)  # beside the leader
    assert fleet.workers_on("n1") == [] and fleet.ranks_on("n1") == 0
    waiting = fleet.audit()["waiting"].values()
    assert "no node has room for it (CPU 2, baton-decode 1)" in waiting
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(90) == 0, fleet.logs()


def test_serve_places_its_workers_on_all_nodes(fleet: Fleet) -> None:
    fleet.add_node("n1", {})
    fleet.add_node("n2", {})
    serve = fleet.start_serve()
    fleet.until_linked(prefill=1, decode=1)
    until(lambda: "Ready at" in fleet.nodes.log("driver"), fleet.logs)
    assert {fleet.host_of("prefill-0"), fleet.host_of("decode-0")} == {
        fleet.nodes.address_of("n1"), fleet.nodes.address_of("n2")
    }  # fmt: skip
    assert fleet.ask()
    assert fleet.nodes.files_with(TOKEN) == fleet.nodes.files_with(PASSWORD) == []
    serve.send_signal(signal.SIGINT)
    assert serve.wait(120) == 0, fleet.logs()
    assert fleet.workers_on("n1") == fleet.workers_on("n2") == []


def test_a_lost_node_moves_its_workers_and_fails_no_request(fleet: Fleet) -> None:
    """A node is killed with its decode worker under load; then a raylet is, whose node lives."""
    fleet.add_node("n1", {"baton-prefill": 1})
    fleet.add_node("n2", {"baton-decode": 2})
    fleet.add_node("n3", {"baton-decode": 2})
    driver = fleet.start_driver("--by-role", "--decode", "2", "--cpus", "0")
    fleet.start_router()
    fleet.until_linked(prefill=1, decode=2)
    nodes = {fleet.nodes.address_of(name): name for name in ("n2", "n3")}
    lost = nodes[fleet.host_of("decode-0")]
    kept = nodes[fleet.host_of("decode-1")]
    assert lost != kept, "two workers of a role are spread over two nodes"
    (expected,) = fleet.streams(1, TOKENS).end()

    streams = fleet.streams(4, TOKENS)
    fleet.nodes.kill(lost)
    assert streams.end() == [expected] * 4, fleet.logs()
    fleet.until_linked(prefill=1, decode=2)
    until(lambda: fleet.host_of("decode-0") == fleet.nodes.address_of(kept), fleet.logs)
    assert len(fleet.workers_on(kept)) == 2

    fleet.add_node("n4", {"baton-prefill": 1})
    before = fleet.status()["prefill-0"]
    with fleet.asking() as asking:
        assert fleet.nodes.kill_programs("n1", "raylet/raylet ") == 1
        until(lambda: fleet.workers_on("n4") != [], fleet.logs)
        until(lambda: fleet.workers_on("n1") == [], fleet.logs)
        until(lambda: fleet.host_of("prefill-0") == fleet.nodes.address_of("n4"), fleet.logs)
    assert asking.asked > 0 and asking.wrong == [], fleet.logs()
    assert fleet.status()["prefill-0"]["boot_id"] != before["boot_id"]
    fleet.until_linked(prefill=1, decode=2)
    assert fleet.ask() == asking.expected
    rows = fleet.status().values()
    assert [row["busy_blocks"] for row in rows] == [row["running"] for row in rows] == [0, 0, 0]

    driver.send_signal(signal.SIGTERM)
    assert driver.wait(90) == 0, fleet.logs()
    for name in ("n1", kept, "n4"):
        assert fleet.workers_on(name) == [], name
    assert fleet.status() == {}


def test_workers_serve_without_ray_and_are_adopted_later(fleet: Fleet) -> None:
    fleet.add_node("n1", {"baton-prefill": 1, "baton-decode": 1})
    fleet.add_node("n2", {"baton-prefill": 1, "baton-decode": 1})
    fleet.start_driver("--by-role", "--leave-workers", "--cpus", "0")
    fleet.start_router()
    fleet.until_linked(prefill=1, decode=1)
    before = fleet.status()
    with fleet.asking() as asking:
        fleet.nodes.kill_ray()
        fleet.nodes.start_head()
        for name in ("n1", "n2"):
            fleet.add_node(name, {"baton-prefill": 1, "baton-decode": 1})
        driver = fleet.start_driver("--by-role", "--leave-workers", "--cpus", "0")
        until(lambda: fleet.nodes.log("driver").count("worker registered") == 4, fleet.logs)
    assert asking.asked > 0 and asking.wrong == [], fleet.logs()
    assert {n: row["boot_id"] for n, row in fleet.status().items()} == {
        n: row["boot_id"] for n, row in before.items()
    }
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(30) == 0, fleet.logs()
    assert fleet.ask() == asking.expected
