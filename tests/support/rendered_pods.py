"""Runs the containers of a rendered release as processes of this host.

A pod's address is a loopback address; what a container mounts is a folder of the test. Names of
Services and mounted paths are replaced in arguments and environment, nothing else is.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.deploy.host.release_secrets import create_certificates, create_credentials
from baton.deploy.host.secrets_api import Secret
from baton.models.embedded import embedded_model
from chaos.redis_server import server_binary
from tests.support.chart import Document

BATON = Path(sys.executable).with_name("baton")

PROBE_S = 0.2
READY_S = 60.0  # from the end of the startup probe


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
    """One container that runs, with the address of its pod."""

    name: str
    address: str
    container: Document
    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self) -> None:
        """Wait for the startup probe, then for readiness. Raises AssertionError with the log."""
        startup = self.container["startupProbe"]
        limit_s = startup["periodSeconds"] * startup["failureThreshold"]
        for probe, within_s in (("startupProbe", limit_s), ("readinessProbe", READY_S)):
            deadline_s = time.monotonic() + within_s
            while not self._answers(self.container[probe]):
                if self.process.poll() is not None or time.monotonic() > deadline_s:
                    raise AssertionError(f"{self.name}: {probe}\n{self.log.read_text()[-4000:]}")
                time.sleep(PROBE_S)

    def alive(self) -> bool:
        return self._answers(self.container["livenessProbe"])

    def url(self, port: str) -> str:
        (number,) = [
            each["containerPort"] for each in self.container["ports"] if each["name"] == port
        ]
        return f"http://{self.address}:{number}"

    def environment(self) -> dict[str, str]:
        """Return what its process got, as a command run in its container would."""
        entries = Path(f"/proc/{self.process.pid}/environ").read_text().split("\0")
        return dict(entry.split("=", 1) for entry in entries if entry)

    def stop(self, grace_s: float) -> int:
        """Send SIGTERM; return the exit code. Raises TimeoutExpired after the grace period."""
        self.process.terminate()
        return self.process.wait(grace_s)

    def _answers(self, probe: Document) -> bool:
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


def demo_host(folder: Path) -> Host:
    """Return a place for the pods of values-cpu-demo.yaml: the Secrets that its hook makes, a
    Redis server on a free port, and the model that ships."""
    secrets = MemorySecrets()
    create_credentials(secrets, "chat-baton")
    create_certificates(secrets, "chat-baton", "chat-baton-worker.llm")
    programs = folder / "programs"
    programs.mkdir()
    (programs / "valkey-server").symlink_to(str(server_binary()))
    (programs / "baton").symlink_to(BATON)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    names = {
        "chat-baton-redis.llm:6379": f"127.0.0.1:{port}",
        "port 6379": f"bind 127.0.0.1\\nport {port}",
        "/opt/baton/baton-tiny": str(embedded_model()),
        "/data/": f"{folder}/",
    }
    return Host(folder, secrets, names, programs)


@contextmanager
def running_pods(host: Host, planned: Mapping[str, PlannedPod]) -> Iterator[dict[str, PodProcess]]:
    """Start the pods one after the other, each when the one before it is ready; kill all at the
    end. Redis is not waited for: its probes open its port,
    which is another one here."""
    running: dict[str, PodProcess] = {}
    with ExitStack() as stack:
        for key, pod in planned.items():
            running[key] = start_container(host, pod.spec, pod.name, pod.address)
            stack.callback(running[key].process.wait)
            stack.callback(running[key].process.kill)
            if key != "redis":
                running[key].wait_ready()
        yield running


def check_release(router: PodProcess, decode: PodProcess) -> None:
    """Run `baton release check` as the chart's test pod does: a chat, and KV that was moved.
    Raises AssertionError with its output if it fails."""
    done = subprocess.run(
        [BATON, "release", "check", f"--url={router.url('http')}", "--model=baton-tiny",
         f"--decode={decode.url('admin')}"],
        env={"BATON_API_KEY": router.environment()["BATON_ROUTER__API_KEYS"],
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
        )  # fmt: skip
    return PodProcess(name, address, container, process, log)


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
            made[variable["name"]] = secrets.held[reference["name"]].data[reference["key"]].decode()
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
