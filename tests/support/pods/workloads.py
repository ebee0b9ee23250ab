"""The next actions of controllers: pure, from the wish and the pods there are.

A StatefulSet (podManagementPolicy Parallel) makes all missing pods at once, and replaces old ones
from the last to the first, each once those after it are new and ready, but none below its
partition; an old one is replaced whether it is ready or not. With the strategy OnDelete it replaces
only those that were deleted. A Deployment (maxSurge 1, maxUnavailable 0) adds one new pod, and
takes an old one away once as many as wanted are ready. A RayGroup stands for a group of a
RayCluster (kuberay.py): its pods stay as they are, whatever its template has become, until they are
named in workersToDelete or deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

KINDS = ("StatefulSet", "Deployment", "RayGroup")


@dataclass(frozen=True, slots=True)
class PodState:
    """A pod that is not gone. `number`: of a StatefulSet's pod."""

    name: str
    revision: str
    ready: bool
    terminating: bool
    number: int = 0


@dataclass(frozen=True, slots=True)
class Actions:
    """Numbers of the pods to make, and names of the pods to end."""

    make: tuple[int, ...] = ()
    end: tuple[str, ...] = ()


def revision_of(template: dict[str, Any]) -> str:
    """Return what is another for another template."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def replaces_old(document: dict[str, Any]) -> bool:
    """Return whether an object's controller ends pods of an earlier template by itself."""
    strategy = document["spec"].get("updateStrategy", {})
    return document["kind"] != "RayGroup" and bool(strategy.get("type") != "OnDelete")


def partition_of(document: dict[str, Any]) -> int:
    """Return the number from which on a StatefulSet's pods follow its template. A pod below it
    that is lost comes back by the new template here, by the earlier one in a cluster."""
    strategy = document["spec"].get("updateStrategy", {})
    return int(strategy.get("rollingUpdate", {}).get("partition", 0))


def stateful_set(replicas: int, revision: str, pods: Sequence[PodState]) -> Actions:
    there = {each.number for each in pods}
    make = tuple(number for number in range(replicas) if number not in there)
    end = tuple(e.name for e in pods if e.number >= replicas and not e.terminating)
    if make or end:
        return Actions(make, end)
    for each in sorted(pods, key=lambda each: -each.number):
        if each.revision != revision and not each.terminating:
            return Actions(end=(each.name,))
        if not each.ready or each.terminating:
            break
    return Actions()


def deployment(replicas: int, revision: str, pods: Sequence[PodState], next_number: int) -> Actions:
    live = [each for each in pods if not each.terminating]
    new = [each for each in live if each.revision == revision]
    old = [each for each in live if each.revision != revision]
    room = replicas + 1 - len(live)
    count = max(0, min(replicas - len(new), room))
    if not old:
        count = max(0, replicas - len(new))
    make = tuple(range(next_number, next_number + count))
    ready = sum(each.ready for each in live)
    end: tuple[str, ...] = ()
    if old and ready > replicas:
        end = (min(old, key=lambda each: each.ready).name,)
    elif old and any(not each.ready for each in old):
        end = (next(each for each in old if not each.ready).name,)
    elif len(new) > replicas:
        end = (new[-1].name,)
    return Actions(make, end)


def ray_group(
    replicas: int, named: Collection[str], pods: Sequence[PodState], next_number: int
) -> Actions:
    """Take KubeRay's step. A pod that ends counts until it is gone, unless it is named."""
    left = [each for each in pods if each.name not in named]
    end = [each.name for each in pods if each.name in named and not each.terminating]
    missing = max(0, replicas - len(left))
    surplus = max(0, len(left) - replicas)
    end += [each.name for each in left[:surplus] if not each.terminating]
    return Actions(tuple(range(next_number, next_number + missing)), tuple(end))


def next_actions(document: dict[str, Any], pods: Sequence[PodState], next_number: int) -> Actions:
    """Return what the controller of an object of KINDS does next. `next_number`: of a pod that
    has no place of its own."""
    spec = document["spec"]
    replicas = int(spec["replicas"])
    if document["kind"] == "RayGroup":
        return ray_group(replicas, spec["workersToDelete"], pods, next_number)
    revision = revision_of(spec["template"])
    if document["kind"] == "Deployment":
        return deployment(replicas, revision, pods, next_number)
    kept = partition_of(document) if replaces_old(document) else replicas
    pods = [replace(e, revision=revision) if e.number < kept else e for e in pods]
    return stateful_set(replicas, revision, pods)


def settled(document: dict[str, Any], pods: Sequence[PodState]) -> bool:
    """Return whether the controller has nothing left to do, and all its pods are ready."""
    replicas = int(document["spec"]["replicas"])
    if not replaces_old(document):
        return len(pods) == replicas and all(e.ready and not e.terminating for e in pods)
    revision = revision_of(document["spec"]["template"])
    kept = partition_of(document)
    pods = [replace(e, revision=revision) if e.number < kept else e for e in pods]
    return fully_new(replicas, revision, pods)


def fully_new(replicas: int, revision: str, pods: Sequence[PodState]) -> bool:
    """Return whether exactly the wanted pods are there, ready and of the wanted revision."""
    return len(pods) == replicas and all(
        e.ready and not e.terminating and e.revision == revision for e in pods
    )
