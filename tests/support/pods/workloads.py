"""The next actions of a StatefulSet and a Deployment: pure, from the wish and the pods there are.

A StatefulSet (podManagementPolicy Parallel) makes all missing pods at once, and replaces old ones
from the last to the first, each once all others are ready. A Deployment (maxSurge 1,
maxUnavailable 0) adds one new pod, and takes an old one away once as many as wanted are ready.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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


def stateful_set(replicas: int, revision: str, pods: Sequence[PodState]) -> Actions:
    there = {each.number for each in pods}
    make = tuple(number for number in range(replicas) if number not in there)
    end = tuple(e.name for e in pods if e.number >= replicas and not e.terminating)
    old = [e for e in pods if e.revision != revision and e.number < replicas]
    settled = all(e.ready and not e.terminating for e in pods)
    if old and settled and not make and not end:
        end = (max(old, key=lambda each: each.number).name,)
    return Actions(make, end)


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


def fully_new(replicas: int, revision: str, pods: Sequence[PodState]) -> bool:
    """Return whether exactly the wanted pods are there, ready and of the wanted revision."""
    return len(pods) == replicas and all(
        e.ready and not e.terminating and e.revision == revision for e in pods
    )
