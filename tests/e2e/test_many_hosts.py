"""Processes that are started one by one, as on several hosts: Redis, addresses, certificates.

Each worker listens on all addresses of this machine and announces one of its own (127.0.0.2 and
127.0.0.3), for which `baton authority` has issued its certificate.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.models.embedded import embedded_model
from chaos.redis_server import RedisServer, running_server
from chaos.starter import start
from tests.support.redis_server import required_binary
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

BATON = (sys.executable, "-P", "-m", "baton.deploy.cli.main")
READY_S = 240.0
LIFETIME_S = 15.0  # of an entry: in this time all are registered again, and linked
TOKEN = "one secret for all hosts"
HOSTS = {"prefill-0": "127.0.0.2", "prefill-1": "127.0.0.4", "decode-0": "127.0.0.3"}


class Hosts:
    """The processes of one cluster, each with the settings of a host of its own."""

    def __init__(self, folder: Path, server: RedisServer) -> None:
        self.folder = folder
        self._server = server
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = os.environ | {
            "BATON_TOKEN": TOKEN,
            "OMP_WAIT_POLICY": "passive",
            "GOMP_SPINCOUNT": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._run("authority", "create", "--folder", str(folder / "authority"))

    def start_worker(self, name: str) -> None:
        role, host = name.split("-")[0], HOSTS[name]
        certificate = self._issue(name, "worker", "--host", host)
        sizes = ("pool.blocks=256", "worker.dtype=float32", "worker.threads=1")
        address = ("worker.host=0.0.0.0", f"worker.advertise={host}")
        self._start(
            name, ["worker", "--role", role, "--worker-id", name], *certificate, *sizes, *address
        )

    def start_router(self, name: str = "router") -> None:
        command = ["router", "--model-name", "small"]
        command += ["--address-file", str(self.folder / f"{name}.address")]
        self._start(name, command, *self._issue(name, "router"), "router.port=0")

    def as_client(self, *command: str) -> str:
        """Return what a command prints that is run with a certificate of its own."""
        settings = [f"--set={each}" for each in self._issue("operator", "client")]
        where = ["--registry", self._server.url]
        return self._run(*command, *where, *settings)

    def url(self, name: str = "router") -> str:
        path = self.folder / f"{name}.address"
        self.until(path.exists)
        return f"http://{path.read_text().strip()}"

    def linked(self, name: str = "router") -> dict[str, int]:
        """Workers of each role that a router is linked to; none while it is not ready."""
        answer = httpx.get(f"{self.url(name)}/readyz", timeout=10)
        return dict(answer.json()["workers"]) if answer.status_code == 200 else {}

    def metric(self, metric: str, name: str = "router") -> float:
        text = httpx.get(f"{self.url(name)}/metrics", timeout=10).text
        (line,) = [line for line in text.splitlines() if line.startswith(f"{metric} ")]
        return float(line.split()[1])

    def ask(self, text: str, name: str = "router") -> str:
        """Return a greedy answer."""
        messages = [{"role": "user", "content": text}]
        body: dict[str, Any] = {"model": "small", "messages": messages, "temperature": 0}
        url = f"{self.url(name)}/v1/chat/completions"
        answer = httpx.post(url, json=body | {"max_tokens": 12}, timeout=60)
        assert answer.status_code == 200, answer.text
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content

    def until(self, happened: Callable[[], bool]) -> None:
        def happened_to_the_living() -> bool:
            dead = [name for name, each in self._processes.items() if each.poll() is not None]
            assert not dead, f"{dead} ended: {self.logs()}"
            return happened()

        wait_until(happened_to_the_living, READY_S, every_s=0.1, show=self.logs)

    def events(self, name: str, event: str) -> int:
        """How often a process has logged an event."""
        return (self.folder / f"{name}.log").read_text().count(event)

    def logs(self) -> str:
        return "\n".join(f"{e.name}:\n{e.read_text()}" for e in self.folder.glob("*.log"))

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()

    def _issue(self, name: str, role: str, *hosts: str) -> list[str]:
        folder = self.folder / "certificates" / name
        command = ["issue", "--folder", str(self.folder / "authority"), "--out", str(folder)]
        return self._run("authority", *command, "--role", role, "--name", name, *hosts).split()

    def _run(self, *command: str) -> str:
        environment = self._environment
        return subprocess.check_output([*BATON, *command], text=True, timeout=120, env=environment)

    def _start(self, name: str, command: list[str], *settings: str) -> None:
        where = ["--model", str(embedded_model()), "--registry", self._server.url]
        flags = [f"--set={setting}" for setting in ("router.placement=disaggregated", *settings)]
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = start(
                [*BATON, *command, *where, *flags], self._environment, log
            )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_server(tmp_path, required_binary()) as made:
        yield made


def test_a_fleet_serves_through_an_outage_of_its_registry(
    tmp_path: Path, server: RedisServer
) -> None:
    hosts = Hosts(tmp_path, server)
    try:
        hosts.start_router()
        hosts.start_worker("prefill-0")
        hosts.start_worker("decode-0")
        hosts.until(lambda: hosts.linked() == {"prefill": 1, "decode": 1})
        expected = hosts.ask("Name three rivers, please, and say where each begins.")
        server.kill()
        hosts.until(lambda: hosts.metric("baton_registry_up") == 0)
        hosts.start_worker("prefill-1")  # it is not found in the outage
        hosts.start_router("router-1")  # nor does a new router find a worker
        time.sleep(17.0)  # longer than the lifetime of entries
        assert hosts.linked() == {"prefill": 1, "decode": 1}
        assert hosts.ask("Name three rivers, please, and say where each begins.") == expected
        assert hosts.linked("router-1") == {}
        hosts.until(lambda: hosts.events("prefill-1", "worker ready") == 1)
        begun_s = time.monotonic()
        server.start()  # empty
        for router in ("router", "router-1"):
            hosts.until(lambda name=router: hosts.linked(name) == {"prefill": 2, "decode": 1})
        assert time.monotonic() - begun_s < LIFETIME_S, hosts.logs()
        hosts.until(lambda: hosts.metric("baton_registry_up") == 1)
        for router in ("router", "router-1"):  # each hears of the other
            hosts.until(lambda name=router: hosts.metric("baton_other_routers", name) == 1)
        answer = hosts.ask("Name three rivers, please, and say where each begins.", "router-1")
        assert answer == expected
        for name in ("router", "router-1", "prefill-0", "prefill-1", "decode-0"):
            hosts.until(lambda name=name: hosts.events(name, "registry available again") >= 1)
        for name in ("router", "router-1", "prefill-0", "prefill-1", "decode-0"):
            for event in ("registry unavailable", "registry available again"):
                assert hosts.events(name, event) == 1, hosts.logs()
        status = json.loads(hosts.as_client("cluster", "status", "--json"))
        assert {row["worker_id"]: row["state"] for row in status["workers"]} == dict.fromkeys(
            HOSTS, "ready"
        )
        assert [row["workers"] for row in status["routers"]] == [3, 3]
        assert status["warnings"] == []
        assert "prefill-1 has ended" in hosts.as_client("drain", "prefill-1")
    finally:
        hosts.close()
