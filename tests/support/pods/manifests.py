"""The parts of a release's objects that several parts of the runner read. Pure."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from typing import Any

from tests.support.pods.pod import Pod, port_number
from tests.support.pods.rayclusters import timestamp

Document = dict[str, Any]
RESTARTED = "kubectl.kubernetes.io/restartedAt"
# What an upgrade may change in the specification; the rest is immutable.
MUTABLE = {
    "Job": {"activeDeadlineSeconds", "backoffLimit", "parallelism", "suspend"},
    "StatefulSet": {
        "minReadySeconds", "ordinals", "persistentVolumeClaimRetentionPolicy", "replicas",
        "revisionHistoryLimit", "template", "updateStrategy",
    },
}  # fmt: skip


def refuse_changes(old: Document | None, new: Document) -> None:
    """Raise ValueError where an object would change in what Kubernetes keeps immutable."""
    mutable = MUTABLE.get(new["kind"])
    if old is None or mutable is None:
        return
    for name in sorted((old["spec"].keys() | new["spec"].keys()) - mutable):
        if old["spec"].get(name) != new["spec"].get(name):
            kind, called = new["kind"], new["metadata"]["name"]
            raise ValueError(f"{kind} {called}: spec.{name}: field is immutable")


def with_restarts(old: Document | None, new: Document) -> Document:
    """Return an applied object with the mark of `kubectl rollout restart` that the old one has,
    which Helm leaves."""
    if old is None or new["kind"] not in ("Deployment", "StatefulSet"):
        return new
    marks = old["spec"]["template"]["metadata"].get("annotations", {})
    return restarted(new, marks[RESTARTED]) if RESTARTED in marks else new


def restarted(document: Document, mark: str) -> Document:
    """Return an object whose pods are to be replaced, as `kubectl rollout restart` writes it."""
    made = copy.deepcopy(document)
    metadata = made["spec"]["template"]["metadata"]
    metadata["annotations"] = {**metadata.get("annotations", {}), RESTARTED: mark}
    return made


def hooks_of(document: Document) -> list[str]:
    """Return when Helm runs an object: pre-install, test, ...; none for what it installs."""
    found = document["metadata"].get("annotations", {}).get("helm.sh/hook", "")
    return [each for each in found.split(",") if each]


def hook_weight(document: Document) -> int:
    """Return a hook's place in the order of hooks."""
    return int(document["metadata"]["annotations"].get("helm.sh/hook-weight", 0))


def service_address(name: str) -> str:
    """Return the address of a Service, which its name determines."""
    digest = hashlib.sha256(name.encode()).digest()
    return f"10.96.{digest[0]}.{digest[1] % 250 + 2}"


def target_port(pod: Pod, port: str | int) -> int:
    """Return the number of a pod's port that a Service names. Raises KeyError."""
    for container in pod.spec["containers"]:
        if isinstance(port, int) or any(e["name"] == port for e in container.get("ports", ())):
            return port_number(container, port)
    raise KeyError(f"{pod.name} has no port {port}")


def keyed(documents: Iterable[Document]) -> dict[tuple[str, str], Document]:
    """Return objects by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def object_of(pod: Pod) -> Document:
    """Return what the Kubernetes API shows of a pod; one that is not ready waits."""
    number = pod.name.rpartition("-")[2]
    metadata: Document = {
        "name": pod.name, "labels": pod.labels, "annotations": pod.annotations,
        "creationTimestamp": timestamp(int(number) if number.isdecimal() else 0),
    }  # fmt: skip
    if pod.terminating:
        metadata["deletionTimestamp"] = timestamp(0)
    status = {
        "podIP": pod.address,
        "phase": "Running" if pod.ready else "Pending",
        "conditions": [{"type": "Ready", "status": str(pod.ready)}],
        "containerStatuses": [
            {"name": name, "ready": ready} for name, ready in pod.containers_ready().items()
        ],
    }
    return {"metadata": metadata, "spec": pod.spec, "status": status}


def evictions_allowed(budget: Document, wanted: int, ready: int) -> int:
    """Return how many more pods of a PodDisruptionBudget may leave now: `wanted` by their
    controllers, of which so many are ready."""
    spec = budget["spec"]
    if "minAvailable" in spec:
        return ready - int(spec["minAvailable"])
    return ready - (wanted - int(spec["maxUnavailable"]))
