"""The number of workers in the pods of a RayCluster of KubeRay, which `baton fleet` keeps there.

    fleet's number, GET RayCluster ─▶ pods asked for ─▶ copied to that number, which the driver
    follows
    more:   PATCH replicas ─▶ KubeRay makes pods, and the driver's waiting actors start on them
    fewer:  GET pods ─▶ the pod of the last worker ─▶ one PATCH: workersToDelete and replicas

The RayCluster alone says how many there are. The number on Redis (fleet_number.py) is a copy: each
reading corrects it, so that a controller that ends between the two, or a user of `kubectl`, leaves
nothing undone. The copy is read before the RayCluster, and replaced only if it is still what was
read: a leader that is late overwrites no copy of its successor. One group has the workers of both
roles; how many of them begin as prefill workers is the driver's own number, which only it changes.
The account needs `get` and `patch` of one RayCluster, and `list` of pods: the one that leaves has
to be named, also if no worker runs in it yet, since KubeRay deletes any other, and pods say why
their workers do not get ready.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from baton.deploy.control.fleet_number import FleetSize, ForeignNumber, log_restored
from baton.deploy.control.kubernetes_calls import call_api
from baton.deploy.control.pod_problems import pod_problem
from baton.deploy.control.resize_target import ResizeTarget
from baton.deploy.host.kubernetes_api import JSON_PATCH, KubernetesApi
from baton.deploy.host.raycluster import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    Document,
    PodGroup,
    worker_group,
)
from baton.planner.control.worker_count import WorkerCount, fleet_count
from baton.planner.overdue_workers import WorkerProblem
from baton.runtime import logs
from baton.runtime.errors import BatonError, Unavailable

PAGE_PODS = 100  # in one answer, whose bytes are bounded

log = logs.get(__name__)


class CopiedNumber(Protocol):
    """The number that `baton fleet --follow` reads (fleet_number.py)."""

    async def read(self) -> tuple[FleetSize, bytes] | None: ...

    async def propose(self, size: FleetSize) -> None: ...

    async def replace(self, text: bytes, size: FleetSize) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GroupPod:
    """A pod of a group. `host` is None until it has an address; `waits`: for a node, or for its
    containers; `made`: when, as text that sorts; `problem`: what keeps it from getting ready."""

    name: str
    host: str | None
    ending: bool
    waits: bool
    made: str
    problem: WorkerProblem | None = None


class RayClusterWorkers:
    """`target` in `namespace`. `hosts` returns where registered workers run, by worker id. Raises
    BatonError if the API or the Redis server refuses, Unavailable without an answer in time: then a
    PATCH may have had its effect, which the next `count` shows."""

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        target: ResizeTarget,
        number: CopiedNumber,
        hosts: Callable[[], Mapping[str, str]],
    ) -> None:
        self._api = api
        self._target = target
        self._number = number
        self._hosts = hosts
        space = quote(namespace, safe="")
        name = quote(target.name, safe="")
        self._path = f"/apis/ray.io/v1/namespaces/{space}/rayclusters/{name}"
        self._pods_path = f"/api/v1/namespaces/{space}/pods"
        self._found: Document = {}  # as read last
        self._prefill: int | None = None  # as the driver wrote last

    async def count(self) -> WorkerCount:
        """Read the number of pods, and let the driver follow it."""
        copied = await self._read_copy()
        self._found = await call_api(self._api, "GET", self._path)
        prefill, group = self._prefill_of(copied), self._group()
        size = FleetSize(prefill, group.replicas - prefill)
        if size.decode < 1:
            raise BatonError(
                f"the group {group.name} of the RayCluster has {group.replicas} pods, and "
                f"{prefill} workers of `baton fleet` begin as prefill workers: set minReplicas to "
                f"{prefill + 1} or more"
            )
        await self._copy(copied, size)
        return fleet_count(_version(self._found), size.prefill, size.decode)

    async def check(self, seen: WorkerCount, workers: int) -> None:
        """Ask whether `resize` would be accepted now. Changes nothing."""
        await self._patch(f"{self._path}?dryRun=All", seen, workers)

    async def resize(self, seen: WorkerCount, workers: int) -> None:
        """Ask for another number of pods, if the object is still as it was seen last. The next
        `count` lets the driver follow."""
        await self._patch(self._path, seen, workers)

    async def problems(self, missing: Collection[str]) -> dict[str, WorkerProblem]:
        """Return what pods without a registered worker say. A pod has no worker's name before that:
        the missing workers stand for the group's pods in any order."""
        registered = self._hosts()
        names = [each for each in missing if each not in registered]
        if not names:
            return {}
        hosts, group = set(registered.values()), self._group()
        pods = [e for e in await self._pods(group.name) if e.name not in group.named]
        said = [e.problem for e in pods if e.host not in hosts and e.problem is not None]
        text = f"the group {group.name} has {len(pods)} of {group.replicas} pods"
        said += [WorkerProblem("no_pod", text)] * (group.replicas - len(pods))
        return dict(zip(names, said, strict=False))  # others may only be slow

    async def close(self) -> None:
        await self._number.close()

    async def _read_copy(self) -> tuple[FleetSize, bytes] | ForeignNumber | None:
        try:
            return await self._number.read()
        except ForeignNumber as error:
            return error

    def _prefill_of(self, found: tuple[FleetSize, bytes] | ForeignNumber | None) -> int:
        """Return how many workers begin as prefill workers, as the driver has written it. Raises
        Unavailable if no number of a driver was read yet."""
        if isinstance(found, tuple):
            self._prefill = found[0].prefill
        if self._prefill is not None:
            return self._prefill
        if isinstance(found, ForeignNumber):
            raise found
        raise Unavailable(
            "`baton fleet --follow` has not written yet how many workers begin as prefill workers: "
            "see its log"
        )

    async def _copy(
        self, found: tuple[FleetSize, bytes] | ForeignNumber | None, size: FleetSize
    ) -> None:
        """Write the number of decode workers where the driver reads it, unless it is there. That
        of prefill workers is the driver's own."""
        if isinstance(found, ForeignNumber):
            await self._number.replace(found.text, size)
            log_restored(found, size)
            return
        if found is None:
            await self._number.propose(size)
        elif found[0].decode != size.decode:
            before, text = found
            await self._number.replace(text, FleetSize(before.prefill, size.decode))
            log.info("fleet number corrected", decode=size.decode, before=before.decode)

    async def _patch(self, path: str, seen: WorkerCount, workers: int) -> None:
        if _version(self._found) != seen.version:
            raise BatonError("the RayCluster has been read again since the decision")
        group = self._group()
        if not max(seen.least, group.least) <= workers <= group.most:
            raise BatonError(
                f"{workers} workers need as many pods of the group {group.name}, whose minReplicas "
                f"is {group.least} and maxReplicas {group.most}, and {seen.least} workers are the "
                "least that `baton fleet` keeps: change these, or the bounds of --workers"
            )
        if workers >= group.replicas:
            patch = group.patch(replicas=workers)
        else:
            pods = await self._pods(group.name)
            hosts = self._hosts()
            last_host = None if seen.last_id is None else hosts.get(seen.last_id)
            leaving = leaving_pod(group, pods, last_host, set(hosts.values()), workers)
            there = {each.name for each in pods}
            patch = group.patch(replicas=workers, leaving=leaving, there=there)
        version = {"op": "test", "path": "/metadata/resourceVersion", "value": seen.version}
        await call_api(self._api, "PATCH", path, [version, *patch], JSON_PATCH)

    def _group(self) -> PodGroup:
        try:
            return worker_group(self._found, self._target.group)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BatonError(
                f"the Kubernetes API answered with no RayCluster ({error!r})"
            ) from error

    async def _pods(self, group: str) -> list[GroupPod]:
        labels = f"{CLUSTER_LABEL}={self._target.name},{GROUP_LABEL}={group}"
        query = {"labelSelector": labels, "limit": str(PAGE_PODS)}
        found: list[GroupPod] = []
        while True:
            path = f"{self._pods_path}?{urlencode(query)}"
            answer = await call_api(self._api, "GET", path)
            try:
                found += [_pod(each) for each in answer["items"]]
                more = str(answer.get("metadata", {}).get("continue", ""))
            except (KeyError, TypeError, AttributeError) as error:
                raise BatonError(
                    f"the Kubernetes API answered with no list of pods ({error!r})"
                ) from error
            if not more:
                return found
            query["continue"] = more


def leaving_pod(
    group: PodGroup,
    pods: Sequence[GroupPod],
    last_host: str | None,
    hosts: Collection[str],
    replicas: int,
) -> str | None:
    """Return the pod to name when the number falls to `replicas`: that at `last_host`, else one
    without a registered worker: an ending one first, then a waiting one, then the newest. `hosts`
    are those of all registered workers. None if there are no more pods than `replicas`: KubeRay
    deletes none then. Raises BatonError if no pod can be named, or if KubeRay would delete others
    too."""
    counted = [each for each in pods if each.name not in group.named]
    surplus = len(counted) - replicas
    if surplus <= 0:
        return None
    if surplus > 1:
        raise BatonError(
            f"the group {group.name} has {len(counted)} pods, and {group.replicas} are asked for: "
            "KubeRay has not completed the last request yet"
        )
    if last_host is not None:
        found = [each for each in counted if each.host == last_host]
        if not found:
            raise BatonError(
                f"the worker that leaves runs at {last_host}, where the group {group.name} has no "
                "pod"
            )
        return found[0].name
    free = [each for each in counted if each.host is None or each.host not in hosts]
    if not free:
        raise BatonError(
            f"the worker that leaves is not registered, but each pod of the group {group.name} "
            "has a registered worker"
        )
    return max(free, key=lambda each: (each.ending, each.waits, each.made, each.name)).name


def _version(cluster: Document) -> str:
    return str(cluster.get("metadata", {}).get("resourceVersion", ""))


def _pod(found: Mapping[str, Any]) -> GroupPod:
    metadata, status = found["metadata"], found.get("status", {})
    return GroupPod(
        name=str(metadata["name"]),
        host=status.get("podIP"),
        ending="deletionTimestamp" in metadata,
        waits=status.get("phase") == "Pending",
        made=str(metadata.get("creationTimestamp", "")),
        problem=pod_problem(found),
    )
