"""`baton release replace`: old pods of a RayCluster are replaced one by one, with `kubectl`.

    kubectl get ─▶ ray_pods.next_step ─▶ head: kubectl delete
        ▲                             └▶ worker: its preStop command drains it, then workersToDelete
        └───────────────── until no pod is old ◀────────────────┘

A worker that does not drain keeps its pod. Holds no state: a run that was interrupted is repeated.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.deploy.host.raycluster import CLUSTER_LABEL
from baton.deploy.nodes.ray_pods import HEAD, RayPod, deletion_patch, next_step, pods_of
from baton.runtime.errors import BatonError, ConfigError, Unavailable

POLL_S = 2.0
CALL_S = 60.0  # for kubectl to answer

Kubectl = Callable[[Sequence[str], float], str]


@dataclass(frozen=True, slots=True)
class Replacement:
    """`name` of the RayCluster. `within_s`: the time limit for each pod's drain, and for the
    pods to be ready before the next one."""

    name: str
    within_s: float
    kubectl: Kubectl
    say: Callable[[str], None] = print

    def run(self) -> int:
        """Replace all old pods, and return how many there were. Raises Unavailable where a pod does
        not drain, or the others are not ready in time."""
        waited_s = time.monotonic()
        said: str | None = None
        named: set[str] = set()
        while True:
            step = next_step(*self._look())
            if step.pod is not None and step.pod.name not in named:
                self._replace(step.pod)
                named.add(step.pod.name)
                waited_s = time.monotonic()
                continue
            waits_for = step.waits_for
            if step.pod is not None:
                waits_for = f"{step.pod.name} to be deleted by the operator"
            if waits_for is None:
                return len(named)
            if time.monotonic() - waited_s > self.within_s:
                raise Unavailable(
                    f"waited {self.within_s:g} s for {waits_for}; repair it, then run this again"
                )
            if waits_for != said:
                self.say(f"waiting for {waits_for}")
                said = waits_for
            time.sleep(POLL_S)  # pods change in the cluster

    def _replace(self, pod: RayPod) -> None:
        if pod.group == HEAD:
            self.kubectl(("delete", "pod", pod.name, "--wait=false"), CALL_S)
            self.say(f"{pod.name}: deleted, workers serve on")
            return
        if pod.ready and pod.drain:
            self.say(f"{pod.name}: draining")
            inside = ("exec", pod.name, "-c", pod.container, "--", *pod.drain)
            self.kubectl(inside, self.within_s)
        try:
            self._name(pod)
        except BatonError as error:
            raise Unavailable(
                f"{pod.name} was not named in workersToDelete: {error}; its worker may have "
                "drained, and does not start again there: run this again"
            ) from error
        self.say(f"{pod.name}: named in workersToDelete")

    def _name(self, pod: RayPod) -> None:
        cluster, pods = self._look()  # a drain may take long, and a controller change the number
        patch = json.dumps(deletion_patch(cluster, pod, pods))
        self.kubectl(("patch", "raycluster", self.name, "--type=json", "-p", patch), CALL_S)

    def _look(self) -> tuple[dict[str, Any], list[RayPod]]:
        """Return the RayCluster and its pods."""
        cluster = self._read("raycluster", self.name)
        return cluster, pods_of(cluster, self._read("pods", "-l", f"{CLUSTER_LABEL}={self.name}"))

    def _read(self, *what: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl(("get", *what, "-o", "json"), CALL_S))
        return found


def kubectl_in(namespace: str) -> Kubectl:
    """Return a caller of `kubectl`, which raises Unavailable for a command that fails."""

    def call(words: Sequence[str], within_s: float) -> str:
        command = ["kubectl", *(("-n", namespace) if namespace else ()), *words]
        shown = " ".join(command[:6])
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=within_s, check=False
            )
        except FileNotFoundError as error:
            raise ConfigError("kubectl is not installed, or not on PATH") from error
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"`{shown}` has not ended within {within_s:g} s") from error
        if done.returncode:
            raise Unavailable(f"`{shown}` failed: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    return call
