"""Runs the containers of a rendered release as processes of this host.

A pod's address is a loopback address; what a container mounts is a folder of the test. Names of
Services and mounted paths are replaced in arguments and environment, nothing else is.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.deploy.host.secrets_api import Secret
from tests.support.chart import Document

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
