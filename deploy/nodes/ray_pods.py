"""The next pod of a RayCluster to replace, so that all become those of its definition. Pure.

    head ─▶ workers, from the group with the smallest share of new pods, prefill first

KubeRay changes no pod that runs. A pod is old if its annotation `baton/definition` is not its
group's. Roles take turns, so that new workers, which may be unable to exchange KV with old ones,
find a partner early, and old ones keep theirs long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.deploy.host.raycluster import (
    GROUP_LABEL,
    KIND_LABEL,
    Document,
    Operation,
    worker_group,
    worker_groups,
)
from baton.runtime.errors import ConfigError

DEFINITION = "baton/definition"
HEAD = "head"  # the group's name here
FIRST_ROLE = "prefill"  # the end of a group's name


@dataclass(frozen=True, slots=True)
class RayPod:
    """A pod of a RayCluster. `drain`: the command and its container, none for the head's pod.
    `ready`: for the head's pod its first container, since a driver beside it waits for workers,
    which may first have to be replaced."""

    name: str
    group: str
    current: bool  # made from the group's present template
    ready: bool
    ending: bool
    container: str = ""
    drain: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NextStep:
    """The pod to replace now; or what has to happen before, in `waits_for`; neither: no pod is
    old."""

    pod: RayPod | None = None
    waits_for: str | None = None


def pods_of(cluster: Document, listed: Document) -> list[RayPod]:
    """Return the pods in a PodList that belong to groups of a RayCluster. Raises ConfigError for a
    RayCluster without such annotations."""
    groups = {each["groupName"]: each["template"] for each in worker_groups(cluster)}
    groups[HEAD] = cluster["spec"]["headGroupSpec"]["template"]
    wanted = {name: _definition(each.get("metadata", {})) for name, each in groups.items()}
    for name, found in wanted.items():
        if found is None:
            raise ConfigError(
                f"the group {name} of the RayCluster has no annotation {DEFINITION}: install the "
                "release with this version of the chart first"
            )
    made = []
    for pod in listed["items"]:
        metadata, labels = pod["metadata"], pod["metadata"]["labels"]
        group = HEAD if labels[KIND_LABEL] == HEAD else labels[GROUP_LABEL]
        if group in wanted:
            current = _definition(metadata) == wanted[group]
            made.append(_pod(pod, group, current))
    return sorted(made, key=lambda each: each.name)


def next_step(cluster: Document, pods: Sequence[RayPod]) -> NextStep:
    """Return the next step. An old head goes first, whatever the workers do, since only the driver
    of a new one places workers on pods of new groups; then an old pod that is not ready; else all
    must be ready."""
    for pod in pods:
        if pod.group == HEAD and not pod.current and not pod.ending:
            return NextStep(pod)
    for pod in pods:
        if pod.ending:
            return NextStep(waits_for=f"{pod.name} to end")
    names = [each["groupName"] for each in worker_groups(cluster)]
    counts = {name: worker_group(cluster, name).replicas for name in names}
    for group, wanted in {HEAD: 1, **counts}.items():
        there = sum(each.group == group for each in pods)
        if there != wanted:
            return NextStep(waits_for=f"the group {group} to have {wanted} pods, it has {there}")
    for pod in pods:
        if pod.current and not pod.ready:
            return NextStep(waits_for=f"{pod.name} to be ready")
    old = [each for each in pods if not each.current]
    if not old:
        return NextStep()
    shares = {
        group: sum(each.current for each in pods if each.group == group) / wanted
        for group, wanted in counts.items()
        if wanted
    }
    return NextStep(min(old, key=lambda each: _order(each, shares)))


def deletion_patch(cluster: Document, pod: RayPod, pods: Sequence[RayPod]) -> list[Operation]:
    """Return the JSON patch (RFC 6902) that names a worker's pod in `workersToDelete`. KubeRay
    deletes it and makes another; names of pods do not come again. It is refused if a controller
    has changed the group's number since. Raises BatonError if the group is gone."""
    there = {each.name for each in pods}
    return worker_group(cluster, pod.group).patch(leaving=pod.name, there=there)


def _order(pod: RayPod, shares: Mapping[str, float]) -> tuple[Any, ...]:
    return (pod.ready, shares[pod.group], not pod.group.endswith(FIRST_ROLE), pod.name)


def _pod(pod: Document, group: str, current: bool) -> RayPod:
    container = pod["spec"]["containers"][0]
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
    return RayPod(
        name=pod["metadata"]["name"],
        group=group,
        current=current,
        ready=_head_ready(pod) if group == HEAD else _ready(pod),
        ending="deletionTimestamp" in pod["metadata"],
        container=container["name"],
        drain=() if group == HEAD else tuple(hook.get("command", ())),
    )


def _ready(pod: Document) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(e["type"] == "Ready" and e["status"] == "True" for e in conditions)


def _head_ready(pod: Document) -> bool:
    first = pod["spec"]["containers"][0]["name"]
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return any(each["name"] == first and each["ready"] for each in statuses)


def _definition(metadata: Document) -> str | None:
    found: str | None = metadata.get("annotations", {}).get(DEFINITION)
    return found or None
