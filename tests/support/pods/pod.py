"""One pod, as a kubelet runs it: init containers one after the other, then its containers.

    startup probe ok ──▶ readiness and liveness probes, each at its own period
    a container ended, or its startup or liveness probe failed too often ──▶ it is started again
    delete ──▶ not ready, preStop, SIGTERM, SIGKILL after the grace period

A thread of the pod's own does all that. Owns its containers; `ready` is what Services look at.
"""

from __future__ import annotations

import http.client
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tests.support.pods.container import Container, ContainerSite, Image, Mount

Document = dict[str, Any]
TICK_S = 0.1
KILLED_S = 10.0
RETRY_S = 1.0  # before a container that is to succeed is started again
PAUSE = ("sleep", "infinity")  # process 1 where containers share their processes


@dataclass(slots=True)
class Probing:
    """The course of one probe. `failures` are in a row."""

    probe: Document
    next_s: float
    failures: int = 0
    passed: bool = False

    def due(self, now_s: float) -> bool:
        if now_s < self.next_s:
            return False
        self.next_s = now_s + float(self.probe.get("periodSeconds", 10))
        return True

    def saw(self, good: bool) -> None:
        self.failures = 0 if good else self.failures + 1
        if good:
            self.passed = True
        elif self.failed:
            self.passed = False

    @property
    def failed(self) -> bool:
        return self.failures >= int(self.probe.get("failureThreshold", 3))


@dataclass(frozen=True, slots=True)
class Event:
    """A report of a kubelet about a pod. `kind`: Normal or Warning."""

    at_s: float  # monotonic
    pod: str
    kind: str
    reason: str
    message: str


@dataclass(slots=True)
class Running:
    """A container and the manifest that it is of. `last_code`: how the one before ended."""

    spec: Document
    container: Container
    probes: dict[str, Probing] = field(default_factory=dict)
    restarts: int = 0
    last_code: int | None = None

    @property
    def started(self) -> bool:
        startup = self.probes.get("startupProbe")
        return startup is None or startup.passed

    @property
    def ready(self) -> bool:
        readiness = self.probes.get("readinessProbe")
        return self.started and (readiness is None or readiness.passed)


@dataclass(frozen=True, slots=True)
class PodParts:
    """The parts of a pod: images by their names, what is behind each volume, the values of
    the environment that Secrets and fields have, the files of its service account."""

    images: Callable[[str], Image]
    volumes: Mapping[str, Mount]
    account: tuple[Mount, ...]
    value_of: Callable[[Document], str | None]
    changed: Callable[[], None]
    record: Callable[[Event], None]


class Pod:
    """Starts at once. `revision` is what its controller compares."""

    def __init__(
        self, name: str, address: str, template: Document, site: ContainerSite, parts: PodParts
    ) -> None:
        self.name, self.address = name, address
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.annotations: dict[str, str] = template["metadata"].get("annotations", {})
        self.spec: Document = template["spec"]
        self.site = site
        self.initialised = 0  # init containers that have succeeded
        self.code: int | None = None  # of a pod that is to end by itself
        self.error: BaseException | None = None
        self.killed_late: list[str] = []  # containers that outlived their grace period
        self._parts = parts
        self._running: dict[str, Running] = {}
        self._log_starts: dict[str, list[int]] = {}  # of each run of a container, in its log
        self.made_s = time.monotonic()
        self._pause: Container | None = None
        self._leaving = threading.Event()
        self._grace_s = float(self.spec.get("terminationGracePeriodSeconds", 30))
        self._was_ready = False
        self._thread = threading.Thread(target=self._live, name=f"pod {name}", daemon=True)
        self._thread.start()

    @property
    def terminating(self) -> bool:
        return self._leaving.is_set()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def ready(self) -> bool:
        running = list(self._running.values())
        whole = len(running) == len(self.spec["containers"])
        return whole and not self.terminating and all(each.ready for each in running)

    def containers_ready(self) -> dict[str, bool]:
        return {name: each.ready for name, each in list(self._running.items())}

    @property
    def restarts(self) -> int:
        return sum(each.restarts for each in list(self._running.values()))

    @property
    def containers(self) -> list[Running]:
        """The containers that have been started, without init containers."""
        return list(self._running.values())

    def delete(self, grace_s: float | None = None) -> None:
        """Begin to end it; a grace of 0 kills it."""
        if grace_s is not None:
            self._grace_s = grace_s
        self._leaving.set()
        self._record("Normal", "Killing", "Stopping its containers")
        self._parts.changed()

    def join(self, within_s: float) -> None:
        """Wait until it is gone. Raises TimeoutError, or what its thread raised."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the pod {self.name} has not ended\n{self.logs()}")
        if self.error is not None:
            raise self.error

    def kill_container(self, name: str) -> None:
        self._running[name].container.signal(signal.SIGKILL)

    def container(self, name: str) -> Container:
        return self._running[name].container

    def logs(self) -> str:
        return "\n".join(
            f"== {self.name} {path.stem}\n{path.read_text()[-3000:]}"
            for path in sorted(self.site.folder.glob("*.log"))
        )

    def log_of(self, container: str, *, previous: bool = False) -> str:
        """Return what the last run of a container has printed, or the one before it. Raises
        LookupError if there was none."""
        starts = [*self._log_starts.get(container, ()), None]
        if len(starts) < (3 if previous else 2):
            raise LookupError(f"{container} of {self.name} has had no such run")
        begin, end = starts[-3:-1] if previous else starts[-2:]
        content = (self.site.folder / f"{container}.log").read_bytes()
        return content[begin:end].decode(errors="replace")

    def _record(self, kind: str, reason: str, message: str) -> None:
        self._parts.record(Event(time.monotonic(), self.name, kind, reason, message))

    def _live(self) -> None:
        try:
            for spec in self.spec.get("initContainers", ()):
                if not self._to_its_end(spec):
                    return
                self.initialised += 1
            if self.spec.get("restartPolicy", "Always") == "Always":
                self._keep_running()
            else:
                self._once()
        except BaseException as error:  # the tests' thread raises it: join
            self.error = error
        finally:
            for each in self._running.values():
                each.container.signal(signal.SIGKILL)
            if self._pause is not None:
                self._pause.signal(signal.SIGKILL)
                self._pause.wait(KILLED_S)
            for volume in self._parts.volumes.values():
                if volume.source.is_relative_to("/dev/shm"):
                    shutil.rmtree(volume.source, ignore_errors=True)
            self._parts.changed()

    def _to_its_end(self, spec: Document) -> bool:
        """Run an init container until it succeeds; whether the pod goes on."""
        while not self._leaving.is_set():
            container = self._start(spec)
            while container.wait(TICK_S) is None:
                if self._leaving.is_set():
                    container.signal(signal.SIGKILL)
            if container.code == 0:
                return True
            self._leaving.wait(RETRY_S)
        return False

    def _once(self) -> None:
        """Run the container to its end; with OnFailure until it succeeds."""
        (spec,) = self.spec["containers"]
        while not self._leaving.is_set():
            container = self._start(spec)
            while (code := container.wait(TICK_S)) is None:
                if self._leaving.is_set():
                    container.signal(signal.SIGKILL)
            if code == 0 or self.spec["restartPolicy"] == "Never":
                self.code = code
                return
            self._leaving.wait(RETRY_S)

    def _keep_running(self) -> None:
        if self.spec.get("shareProcessNamespace"):
            mounts = self._parts.images(self.spec["containers"][0]["image"]).mounts
            self._pause = Container(self.site, "pause", PAUSE, {}, mounts)
        for spec in self.spec["containers"]:
            self._running[spec["name"]] = self._fresh(spec)
        while not self._leaving.wait(TICK_S):
            for name, each in list(self._running.items()):
                if each.container.code is not None or not self._probed(each):
                    self._restart(name, each)
            if self.ready != self._was_ready:
                self._was_ready = self.ready
                self._parts.changed()
        self._end()

    def _restart(self, name: str, old: Running) -> None:
        if old.container.code is None:
            self._terminate(old, self._grace_s)
        made = self._fresh(old.spec)
        made.restarts, made.last_code = old.restarts + 1, old.container.code
        self._running[name] = made

    def _fresh(self, spec: Document) -> Running:
        now_s = time.monotonic()
        probes: dict[str, Probing] = {
            kind: Probing(spec[kind], now_s + float(spec[kind].get("initialDelaySeconds", 0)))
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
            if kind in spec
        }
        return Running(spec, self._start(spec), probes)

    def _probed(self, each: Running) -> bool:
        """Probe what is due; whether the container may live on."""
        kinds = ("readinessProbe", "livenessProbe") if each.started else ("startupProbe",)
        for kind in kinds:
            probing = each.probes.get(kind)
            if probing is not None and probing.due(time.monotonic()):
                good = self._answers(each, probing.probe)
                probing.saw(good)
                if not good:
                    self._record("Warning", "Unhealthy", f"{kind} of {each.spec['name']} failed")
                if probing.failed and kind != "readinessProbe":
                    return False
        return True

    def _answers(self, each: Running, probe: Document) -> bool:
        timeout_s = float(probe.get("timeoutSeconds", 1))
        if "exec" in probe:
            try:
                return each.container.run(probe["exec"]["command"], timeout_s).returncode == 0
            except (subprocess.TimeoutExpired, ProcessLookupError):
                return False
        kind = "tcpSocket" if "tcpSocket" in probe else "httpGet"
        port = port_number(each.spec, probe[kind]["port"])
        try:
            if kind == "tcpSocket":
                socket.create_connection((self.address, port), timeout_s).close()
                return True
            secure = probe[kind].get("scheme") == "HTTPS"
            with closing(probing_call(self.address, port, timeout_s, secure=secure)) as called:
                called.request("GET", probe["httpGet"]["path"])
                return 200 <= called.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False

    def _end(self) -> None:
        """preStop and SIGTERM for all containers at once, within one grace period."""
        deadline_s = time.monotonic() + self._grace_s
        threads = [
            threading.Thread(target=self._terminate, args=(each, self._grace_s))
            for each in self._running.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()) + KILLED_S)

    def _terminate(self, each: Running, grace_s: float) -> None:
        deadline_s = time.monotonic() + grace_s
        hook = each.spec.get("lifecycle", {}).get("preStop")
        if hook is not None and grace_s and each.container.code is None:
            done = each.container.run(hook["exec"]["command"], grace_s)
            with each.container.log.open("a") as log:
                log.write(f"preStop: {done.returncode} {done.stdout}{done.stderr}\n")
        if grace_s:
            each.container.signal(signal.SIGTERM)
        if each.container.wait(max(0.0, deadline_s - time.monotonic())) is None:
            if grace_s:
                self.killed_late.append(each.spec["name"])
            each.container.signal(signal.SIGKILL)
            each.container.wait(KILLED_S)

    def _start(self, spec: Document) -> Container:
        environment = dict(self._parts.images(spec["image"]).environment)
        for variable in spec.get("env", ()):
            value = self._value(variable)
            if value is not None:
                environment[variable["name"]] = expanded(value, environment)
        mounts = [*self._parts.images(spec["image"]).mounts, *self._parts.account]
        for each in spec.get("volumeMounts", ()):
            volume = self._parts.volumes[each["name"]]
            read_only = volume.read_only or each.get("readOnly", False)
            mounts.append(Mount(volume.source, each["mountPath"], read_only))
        words = [*spec["command"], *spec.get("args", ())]
        command = [expanded(word, environment) for word in words]
        log = self.site.folder / f"{spec['name']}.log"
        starts = self._log_starts.setdefault(spec["name"], [])
        starts.append(log.stat().st_size if log.exists() else 0)
        self._record("Normal", "Started", f"Started container {spec['name']}")
        return Container(self.site, spec["name"], command, environment, mounts, self._pause)

    def _value(self, variable: Document) -> str | None:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable.get("value", ""))
        if "fieldRef" in source:
            fields = {"metadata.name": self.name, "status.podIP": self.address}
            return fields[source["fieldRef"]["fieldPath"]]
        return self._parts.value_of(source)


def probing_call(
    host: str, port: int, timeout_s: float, *, secure: bool
) -> http.client.HTTPConnection:
    """Return the connection of a probe. A kubelet trusts any certificate."""
    if not secure:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)


def port_number(spec: Document, port: str | int) -> int:
    """Return the number of a container's port, which a probe or a Service may name."""
    if isinstance(port, int):
        return port
    (number,) = [each["containerPort"] for each in spec["ports"] if each["name"] == port]
    return int(number)


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """Return a text with $(NAME) replaced, as Kubernetes does: unknown names stay."""
    for name, value in environment.items():
        text = text.replace(f"$({name})", value)
    return text
