"""Processes that are started one by one, as on several hosts: Redis, addresses, certificates.

Each worker announces an address of its own, for which `baton authority` has issued its
certificate. Knows no fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from baton.deploy.control import orders
from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.models.embedded import embedded_model
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from chaos.cluster import Site, here
from chaos.redis_server import RedisServer
from chaos.starter import start
from tests.support.waiting import wait_until

BATON = (sys.executable, "-P", "-m", "baton.deploy.cli.main")
READY_S = 240.0
TOKEN = "one secret for all hosts"
API_KEY = "a-key-of-clients"  # of routers that other hosts reach
HEADERS = {"Authorization": f"Bearer {API_KEY}"}


class HostedProcesses:
    """The processes of one cluster. `hosts` are the addresses that workers announce; `site` says
    where a process runs, and its own settings."""

    def __init__(
        self,
        folder: Path,
        server: RedisServer,
        hosts: Mapping[str, str],
        site: Callable[[str], Site] = here,
    ) -> None:
        self.folder = folder
        self._server = server
        self._hosts = hosts
        self._site = site
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = os.environ | {
            "BATON_TOKEN": TOKEN,
            "OMP_WAIT_POLICY": "passive",
            "GOMP_SPINCOUNT": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._run("authority", "create", "--folder", str(folder / "authority"))

    def start_worker(self, name: str) -> None:
        role, certificate = name.split("-")[0], self._issue(name, "worker", self._hosts[name])
        sizes = ("pool.blocks=256", "worker.dtype=float32", "worker.threads=1")
        self._start(name, ["worker", "--role", role, "--worker-id", name], *certificate, *sizes)

    def start_router(self, name: str = "router") -> None:
        command = ["router", "--model-name", "small"]
        command += ["--address-file", str(self.folder / f"{name}.address")]
        settings = ("router.port=0", f"router.api_keys={API_KEY}")
        self._start(name, command, *self._issue(name, "router"), *settings)

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
        """Return one value of a router."""
        return _metric(self.url(name), metric)

    def worker_metric(self, name: str, metric: str) -> float:
        """Return one value of a worker that is registered."""
        config = RegistryConfig(location=self._server.url)
        secrets = ClusterSecrets((TOKEN,), TOKEN)
        cluster = orders.Cluster("test", config, secrets, SecurityConfig(tls="off"))
        found = {each.worker_id: each for each in asyncio.run(cluster.read_workers())}
        return _metric(f"http://{found[name].admin_address}", metric)

    def ask(self, text: str, name: str = "router") -> str:
        """Return a greedy answer."""
        messages = [{"role": "user", "content": text}]
        body: dict[str, Any] = {"model": "small", "messages": messages, "temperature": 0}
        url = f"{self.url(name)}/v1/chat/completions"
        answer = httpx.post(url, json=body | {"max_tokens": 12}, timeout=60, headers=HEADERS)
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
        command += ["--role", role, "--name", name, *(f"--host={host}" for host in hosts)]
        return self._run("authority", *command).split()

    def _run(self, *command: str) -> str:
        environment = self._environment
        return subprocess.check_output([*BATON, *command], text=True, timeout=120, env=environment)

    def _start(self, name: str, command: list[str], *settings: str) -> None:
        where = ["--model", str(embedded_model()), "--registry", self._server.url]
        site = self._site(name)
        settings = ("router.placement=disaggregated", *settings, *site.settings)
        flags = [f"--set={setting}" for setting in settings]
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = start(
                [*site.prefix, *BATON, *command, *where, *flags],
                {**self._environment, **site.environment},
                log,
            )


def _metric(url: str, metric: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=10, headers=HEADERS).text
    (line,) = [line for line in text.splitlines() if line.startswith(f"{metric} ")]
    return float(line.split()[1])
