"""A cluster of real processes: routers and workers as `baton serve` starts them, with gRPC and
NIXL between them, on ports that the system gives. It starts, signals, restarts and audits them.

Where a process runs is its `Site`: this machine as it is, or a network namespace (network.py).
The logs, the routers' address files and, unless workers register elsewhere, the registry lie in one
folder, as in an instance of `baton serve`. Used by the scenarios here, the soak, and the end-to-end
tests. Knows no load.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc.aio
import httpx

from baton.deploy.host.authority import Authority
from baton.deploy.host.instance import grpc_address_file
from baton.models.embedded import embedded_model
from baton.runtime.config import Config
from baton.runtime.grpc_links import open_channel
from baton.runtime.registry import DirectoryRegistry, WorkerRecord
from baton.runtime.settings.loading import load
from baton.runtime.tls import Tls
from chaos.starter import start
from tests.support.machine_speed import slowness
from tests.support.plain_http import NO_AUTHORITIES
from tests.support.waiting import wait_until

START_S = 240.0 * slowness()  # of a fleet with ranks, whose kernels compile on two cores
END_S = 40.0 * slowness()  # from SIGTERM to the end, with its drain
ANSWER_S = 10.0 * slowness()  # of a process whose cores others use too
BATON = (sys.executable, "-P", "-m", "baton.deploy.cli.main")
TOKEN = "a secret of this test"


class ClusterError(AssertionError):
    """A process did not obey an order; the message shows the logs' ends."""


@dataclass(frozen=True, slots=True)
class Site:
    """Settings of one process beside those of all: `prefix` goes before its command."""

    prefix: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Members(Protocol):
    """Where workers register, and which do now."""

    @property
    def location(self) -> str: ...

    def workers(self) -> Sequence[WorkerRecord]: ...


@dataclass(frozen=True, slots=True)
class FolderMembers:
    """The workers that are registered in a folder, made when missing."""

    folder: Path

    @property
    def location(self) -> str:
        return str(self.folder)

    def workers(self) -> Sequence[WorkerRecord]:
        return DirectoryRegistry(self.folder).workers()


def here(_: str) -> Site:
    return Site()


class Cluster:
    """`settings` are `section.key=value`, of all processes; `site` gives each name its own.
    `model` None: the embedded one. `members` None: workers register in the folder. `kept`: workers
    that another process starts.

    A process is called by its name: prefill-0, decode-1, router, router-1. It ends with the one
    that uses this, however that ends.
    """

    def __init__(
        self,
        folder: Path,
        settings: tuple[str, ...] = (),
        site: Callable[[str], Site] = here,
        model: Path | None = None,
        members: Members | None = None,
        kept: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._model = model or embedded_model()
        self.settings = ("pool.blocks=640", "worker.dtype=float32", "worker.threads=1", *settings)
        self.urls: dict[str, str] = {}  # of the routers
        self._admin_urls: dict[str, str] = {}  # of the workers, as they were announced last
        self.grpc_addresses: dict[str, str] = {}  # of those that serve gRPC
        self._site = site
        self._members = members or FolderMembers(folder / "registry")
        self._kept = tuple(kept)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._authority = Authority(folder / "tls")
        self._environment = os.environ | {
            "BATON_TOKEN": TOKEN,
            "OMP_WAIT_POLICY": "passive",
            "GOMP_SPINCOUNT": "0",
            "OMP_NUM_THREADS": "1",
        }

    @property
    def url(self) -> str:
        """The first router's."""
        return next(iter(self.urls.values()))

    def start(
        self, prefill: int, decode: int, routers: int = 1, *, command: tuple[str, ...] = BATON
    ) -> Cluster:
        """Start all, and wait until every router could serve a request by every worker."""
        for role, count in (("prefill", prefill), ("decode", decode)):
            for number in range(count):
                self.start_worker(role, f"{role}-{number}", command=command)
        names = ["router", *(f"router-{number}" for number in range(1, routers))]
        for name in names:
            self._spawn_router(name)
        for name in names:
            self._listening(name)
        self.wait_ready(prefill + decode)
        return self

    def start_worker(self, role: str, name: str, *, command: tuple[str, ...] = BATON) -> None:
        self._spawn(name, (*command, "worker", "--role", role, "--worker-id", name))

    def start_controller(self, *flags: str) -> None:
        """Start `baton controller` for this cluster; it needs no model."""
        self._spawn("controller", (*BATON, "controller", *flags), model=False)

    def start_router(self, name: str) -> str:
        """Start or restart a router; return its URL once it listens."""
        self._spawn_router(name)
        self._listening(name)
        return self.urls[name]

    def restart(self, name: str) -> None:
        """Start again what has ended, and wait until it is of use."""
        if name.startswith("router"):
            self.start_router(name)
        else:
            self.start_worker(name.split("-")[0], name)
        self.wait_ready(len(self.workers()))

    def workers(self) -> list[str]:
        others = ("router", "controller")
        return [*self._kept, *(name for name in self._processes if not name.startswith(others))]

    def names(self) -> list[str]:
        """The names of all processes that were started."""
        return list(self._processes)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def alive(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def wait_ready(self, workers: int) -> None:
        """Wait until so many workers are announced, and linked to every router."""

        def ready() -> bool:
            self._check_alive()
            return len(self.records()) >= workers and self._linked() >= workers

        wait_until(ready, START_S, every_s=0.1, show=self.logs, error=ClusterError)

    def records(self) -> dict[str, WorkerRecord]:
        """The announced workers whose process this cluster started last, and which lives; of those
        that another process starts, all."""
        self._authority.renew()
        found = {each.worker_id: each for each in self._members.workers() if self._is_own(each)}
        self._admin_urls |= {name: f"http://{each.admin_address}" for name, each in found.items()}
        return found

    def _is_own(self, record: WorkerRecord) -> bool:
        name = record.worker_id
        if name in self._kept:
            return True
        return record.pid == self._processes[name].pid and self.alive(name)

    def credentials(self, name: str, host: str | None) -> dict[str, str]:
        """Return the token and a certificate as an environment, for a process started elsewhere.
        `host` None: it listens nowhere."""
        found = {"BATON_TOKEN": TOKEN}
        for key, file in self._authority.issue(name, host).settings().items():
            found[f"BATON_{key.replace('.', '__').upper()}"] = str(file)
        return found

    def channel(self, worker: str) -> grpc.aio.Channel:
        """Open a channel to a worker, by a certificate as its other callers have one."""
        files = self._authority.issue("test", host=None)
        security = load(None, {}, files.settings()).security
        return open_channel(self.records()[worker].address, Tls(security))

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process; SIGKILL also waits for its end."""
        self._processes[name].send_signal(number)
        if number is signal.SIGKILL:
            self._processes[name].wait(10)

    def terminate(self, name: str) -> int:
        """SIGTERM to a process; its exit code."""
        self.kill(name, signal.SIGTERM)
        return self.wait_end(name)

    def wait_end(self, name: str) -> int:
        """Return the exit code of a process that was asked to end."""
        return self._processes[name].wait(END_S)

    def change_role(self, name: str, role: str) -> None:
        """Run `baton role` as a user; return once the worker has the role. Raises ClusterError."""
        certificate = self._authority.issue("client", host=None).settings()
        command = [*BATON, "role", name, role, "--registry", self._members.location]
        settings = [*(f"{key}={value}" for key, value in certificate.items()), *self.settings]
        command += [f"--set={setting}" for setting in settings]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=END_S
        )
        if done.returncode:
            raise ClusterError(f"{done.stdout}{done.stderr}\n{self.logs()}")

    def limit(self, name: str, what: int, most: int) -> int:
        """Set the soft limit `what` (resource.RLIMIT_...) of a running process; the one before."""
        pid = self.pid(name)
        soft, hard = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (most, hard))
        return soft

    def audit(self, name: str) -> dict[str, Any]:
        answer = self._get(name, f"{self._admin_url(name)}/audit")
        if answer.status_code != 200:
            raise ClusterError(f"{name}: {answer.text}")
        found: dict[str, Any] = answer.json()
        return found

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """One value of a process's metrics; 0 if it is not there."""
        wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
        return self.metrics(name).get(f"{metric}{{{wanted}}}" if wanted else metric, 0.0)

    def metrics(self, name: str) -> dict[str, float]:
        """All of a process, by name and labels as they are written."""
        text = self._get(name, f"{self._admin_url(name)}/metrics").text
        found = re.findall(r"^([^#].*) (\S+)$", text, re.MULTILINE)
        return {series: float(value) for series, value in found}

    def total(self, metric: str, **labels: str) -> float:
        """The sum of a metric over the living decode workers."""
        decode = [name for name in self.records() if name.startswith("decode")]
        return sum(self.metric(name, metric, **labels) for name in decode)

    def quiet(self, within_s: float) -> None:
        """Wait until no worker holds anything, longer on slow machines; fails with what is left."""
        if left := self.left_over(within_s * slowness()):
            raise ClusterError(json.dumps(left, indent=1))

    def left_over(self, within_s: float) -> dict[str, dict[str, Any]]:
        """The audits of the workers that still hold something after so long; best empty."""
        deadline = time.monotonic() + within_s
        while True:
            audits = {name: self.audit(name) for name in self.records()}
            left = {name: audit for name, audit in audits.items() if not at_rest(audit)}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)  # a worker's audit can only be asked for again

    def logs(self) -> str:
        """Return the end of each process's log, with the code of one that has ended."""
        return "".join(
            f"--- {path.name}{self._end(path.stem)}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def _end(self, name: str) -> str:
        process = self._processes.get(name)
        code = None if process is None else process.poll()
        return "" if code is None else f" (ended with code {code})"

    def close(self) -> None:
        """End every process; none is left, however it behaves."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def _admin_url(self, name: str) -> str:
        if name.startswith("router"):
            return self.urls[name]
        self.records()  # of a worker that the registry has forgotten, the one last seen is left
        return self._admin_urls[name]

    def _get(self, name: str, url: str) -> httpx.Response:
        """Raises ClusterError, with the logs, for a process that listens no more."""
        try:
            return httpx.get(url, timeout=ANSWER_S, headers=self._headers(), verify=NO_AUTHORITIES)
        except httpx.ConnectError as error:
            raise ClusterError(f"{name}: {error} at {url}\n{self.logs()}") from error

    def _headers(self) -> dict[str, str]:
        for setting in self.settings:
            name, _, value = setting.partition("=")
            if name == "router.api_keys":
                return {"Authorization": f"Bearer {value.split(',')[0]}"}
        return {}

    def _spawn_router(self, name: str) -> None:
        address = self.folder / f"{name}.address"
        address.unlink(missing_ok=True)
        self._spawn(name, (*BATON, "router", "--address-file", str(address)))

    def _listening(self, name: str) -> None:
        """Wait until a router listens, and note where."""
        address = self.folder / f"{name}.address"

        def written() -> bool:
            self._check_alive()
            return address.exists() and bool(address.read_text())

        wait_until(written, START_S, every_s=0.05, show=self.logs, error=ClusterError)
        self.urls[name] = f"http://{address.read_text().strip()}"
        by_grpc = grpc_address_file(address)  # written first, if at all
        if by_grpc.exists():
            self.grpc_addresses[name] = by_grpc.read_text().strip()

    def _linked(self) -> int:
        """The workers that the router with the fewest links has."""
        return min((self._linked_to(url) for url in self.urls.values()), default=0)

    def _linked_to(self, url: str) -> int:
        try:
            answer = httpx.get(f"{url}/readyz", timeout=5, verify=NO_AUTHORITIES)
        except httpx.TransportError:
            return 0
        return sum(answer.json()["workers"].values()) if answer.status_code == 200 else 0

    def _spawn(self, name: str, command: tuple[str, ...], *, model: bool = True) -> None:
        site = self._site(name)
        settings = (*self.settings, *site.settings)
        flags = [f"--set={setting}" for setting in (*self._certificate(name, settings), *settings)]
        if name.startswith("router"):
            flags += ["--set=router.port=0", "--model-name=small"]
        of_model = ["--model", str(self._model)] if model else []
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = start(
                [*site.prefix, *command, *of_model, "--registry", self._members.location, *flags],
                {**self._environment, **site.environment},
                log,
            )

    def _certificate(self, name: str, settings: tuple[str, ...]) -> list[str]:
        given = dict(setting.split("=", 1) for setting in settings)
        host = given.get("worker.host", Config().worker.host)
        listens = not name.startswith(("router", "controller"))
        files = self._authority.issue(name, host if listens else None)
        return [f"{setting}={file}" for setting, file in files.settings().items()]

    def _check_alive(self) -> None:
        for name in self._processes:
            if not self.alive(name):
                raise ClusterError(f"{name} has ended: {self.logs()}")


def end_cleanly() -> None:
    """Let SIGTERM end this process as an exception does: its clusters, namespaces and disks go."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def at_rest(audit: Mapping[str, Any]) -> bool:
    """Whether a worker's books say that it holds nothing for any request."""
    blocks = audit["blocks"]
    held = blocks["leased"] + blocks["pinned"] + blocks["quarantined"] + blocks["used"]
    all_here = blocks["free"] + blocks["cached"] == blocks["total"]
    return bool(held == 0 and all_here and audit["open_handoffs"] == 0 and not audit["running"])
