"""Runs the containers of a rendered release as processes of this host.

A pod's address is a loopback address; what a container mounts is a folder of the test. Names of
Services and mounted paths are replaced in arguments and environment, nothing else is.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.deploy.host.release_secrets import create_certificates, create_credentials
from baton.deploy.host.secrets_api import Secret
from baton.models.embedded import embedded_model
from tests.support.chart import Document
from tests.support.redis_server import required_client, required_tls_binary
from tests.support.waiting import wait_until

BATON = Path(sys.executable).with_name("baton")

PROBE_S = 0.2
RELOAD_S = 0.2  # between two looks at Redis' certificate
READY_S = 60.0  # from the end of the startup probe
RUN_S = 120.0  # of a command in a container


@dataclass(slots=True)
class MemorySecrets:
    """The Secrets of a namespace, in memory."""

    held: dict[str, Secret] = field(default_factory=dict)

    def read(self, name: str) -> Secret | None:
        return self.held.get(name)

    def create(self, secret: Secret) -> bool:
        return self.held.setdefault(secret.name, secret) is secret

    def replace(self, secret: Secret) -> bool:
        self.held[secret.name] = secret
        return True


@dataclass(frozen=True, slots=True)
class Host:
    """The place of a cluster: `names` replaces Service names and paths; `programs` are found
    before those of PATH."""

    folder: Path
    secrets: MemorySecrets
    names: Mapping[str, str]
    programs: Path


@dataclass(slots=True)
class PodProcess:
    """One container that runs, with the address of its pod. `environment` is what its process
    got, as a command run in its container would."""

    name: str
    address: str
    container: Document
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self) -> None:
        """Wait for the startup probe, then for readiness. Raises AssertionError with the log."""
        startup = self.container["startupProbe"]
        limit_s = startup["periodSeconds"] * startup["failureThreshold"]
        for probe, within_s in (("startupProbe", limit_s), ("readinessProbe", READY_S)):
            self._wait_for(probe, within_s)

    def _wait_for(self, probe: str, within_s: float) -> None:
        def log() -> str:
            return f"{self.name}: {probe}\n{self.log.read_text()[-4000:]}"

        def answers() -> bool:
            assert self.process.poll() is None, log()
            return self._answers(self.container[probe])

        wait_until(answers, within_s, every_s=PROBE_S, show=log)

    def alive(self) -> bool:
        return self._answers(self.container["livenessProbe"])

    def url(self, port: str) -> str:
        (number,) = [
            each["containerPort"] for each in self.container["ports"] if each["name"] == port
        ]
        return f"http://{self.address}:{number}"

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command as `kubectl exec` does."""
        return subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )

    def kill(self) -> None:
        """End all processes of the container."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, grace_s: float) -> int:
        """Send SIGTERM; return the exit code. Raises TimeoutExpired after the grace period."""
        self.process.terminate()
        return self.process.wait(grace_s)

    def _answers(self, probe: Document) -> bool:
        if "exec" in probe:
            return self.run(probe["exec"]["command"]).returncode == 0
        url = self.url(probe["httpGet"]["port"]) + probe["httpGet"]["path"]
        try:
            with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.HTTPError):
            return False


@dataclass(frozen=True, slots=True)
class PlannedPod:
    """A pod of a rendered release that is to run with this name and address."""

    spec: Document
    name: str
    address: str


@contextmanager
def demo_host(folder: Path) -> Iterator[Host]:
    """Yield a place for the pods of values-cpu-demo.yaml: the Secrets that its hook makes, a
    Redis server on a free port, which is called by its address, and the model that ships. Skips
    the test without a Redis server that speaks TLS."""
    server, client = required_tls_binary(), required_client()
    secrets = MemorySecrets()
    create_credentials(secrets, "chat-baton")
    create_certificates(secrets, "chat-baton", "chat-baton-worker.llm", redis_names=("127.0.0.1",))
    programs = folder / "programs"
    programs.mkdir()
    (programs / "valkey-server").symlink_to(server)
    (programs / "valkey-cli").symlink_to(client)
    (programs / "baton").symlink_to(BATON)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    data = tempfile.mkdtemp(prefix="redis-")  # its socket's path has 107 bytes at most
    names = {
        "chat-baton-redis.llm:6379": f"127.0.0.1:{port}",
        "tls-port 6379": f"bind 127.0.0.1 tls-port {port}",
        "-p 6379": f"-p {port}",
        "sleep 60": f"sleep {RELOAD_S}",
        "/opt/baton/baton-tiny": str(embedded_model()),
        "/data/": f"{data}/",
    }
    try:
        yield Host(folder, secrets, names, programs)
    finally:
        shutil.rmtree(data)


@contextmanager
def running_pods(host: Host, planned: Mapping[str, PlannedPod]) -> Iterator[dict[str, PodProcess]]:
    """Start the pods one after the other, each when the one before it is ready; kill all at the
    end."""
    running: dict[str, PodProcess] = {}
    with ExitStack() as stack:
        for key, pod in planned.items():
            running[key] = start_container(host, pod.spec, pod.name, pod.address)
            stack.callback(running[key].kill)
            running[key].wait_ready()
        yield running


def check_release(router: PodProcess, decode: PodProcess) -> None:
    """Run `baton release check` as the chart's test pod does: a chat, and KV that was moved.
    Raises AssertionError with its output if it fails."""
    done = subprocess.run(
        [BATON, "release", "check", f"--url={router.url('http')}", "--model=baton-tiny",
         f"--decode={decode.url('admin')}"],
        env={"BATON_API_KEY": router.environment["BATON_ROUTER__API_KEYS"],
             "PATH": "/usr/bin"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "handoffs: " in done.stdout


def start_container(host: Host, pod: Document, name: str, address: str) -> PodProcess:
    """Start the first container of a pod with its command, arguments and environment."""
    container = pod["containers"][0]
    folder = host.folder / name
    folder.mkdir()
    names = dict(host.names)
    for volume in pod["volumes"]:
        if "secret" in volume:
            _write_secret(host.secrets, volume["secret"]["secretName"], folder / volume["name"])
            (mount,) = [
                each for each in container["volumeMounts"] if each["name"] == volume["name"]
            ]
            names[mount["mountPath"]] = str(folder / volume["name"])
    environment = _environment(container, host.secrets, {
        "metadata.name": name, "status.podIP": address})  # fmt: skip
    replaced = {key: _replaced(value, names) for key, value in environment.items()}
    replaced |= {"HOME": str(folder), "PATH": f"{host.programs}:{os.environ['PATH']}"}
    command = [
        re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], _replaced(text, names))
        for text in (*container["command"], *container.get("args", []))
    ]
    log = folder / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [each.replace("=0.0.0.0", f"={address}") for each in command],
            env=replaced, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder,
            start_new_session=True,
        )  # fmt: skip
    return PodProcess(name, address, _with_names(container, names), replaced, process, log)


def _with_names(container: Document, names: Mapping[str, str]) -> Document:
    """Return the container with names replaced in the commands of its probes."""
    made = dict(container)
    for key, probe in container.items():
        if key.endswith("Probe") and "exec" in probe:
            command = [_replaced(text, names) for text in probe["exec"]["command"]]
            made[key] = {**probe, "exec": {"command": command}}
    return made


def _environment(
    container: Document, secrets: MemorySecrets, fields: Mapping[str, str]
) -> dict[str, str]:
    made = {}
    for variable in container.get("env", []):
        source: dict[str, Any] = variable.get("valueFrom", {})
        if "fieldRef" in source:
            made[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            held = secrets.held[reference["name"]].data
            if reference["key"] in held or not reference.get("optional", False):
                made[variable["name"]] = held[reference["key"]].decode()
        else:
            made[variable["name"]] = variable["value"]
    return made


def _write_secret(secrets: MemorySecrets, name: str, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for key, value in secrets.held[name].data.items():
        (folder / key).write_bytes(value)
        (folder / key).chmod(0o600)


def _replaced(text: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(name, value)
    return text
