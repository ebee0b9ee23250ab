"""Which pod of a RayCluster's group leaves."""

from __future__ import annotations

import pytest

from baton.deploy.control.raycluster_workers import GroupPod, leaving_pod
from baton.deploy.host.raycluster import PodGroup
from baton.runtime.errors import BatonError


def test_a_pod_without_a_worker_is_chosen_by_what_it_costs() -> None:
    group = PodGroup("worker", "/spec/workerGroupSpecs/1", 5, 5, 1, 9, ("named",))
    pods = [
        GroupPod("serves", "10.0.0.1", False, False, "5"),
        GroupPod("old", "10.0.0.2", False, False, "1"),
        GroupPod("new", "10.0.0.3", False, False, "2"),
        GroupPod("waits", "", False, True, "3"),
        GroupPod("ends", "10.0.0.4", True, False, "0"),
        GroupPod("named", "10.0.0.5", True, False, "9"),
    ]
    order = []
    while len(pods) > 2:
        order.append(leaving_pod(group, pods, None, {"10.0.0.1"}, len(pods) - 2))
        pods = [each for each in pods if each.name != order[-1]]
    assert order == ["ends", "waits", "new", "old"]
    with pytest.raises(BatonError, match="each pod of the group worker has a registered worker"):
        leaving_pod(group, pods, None, {"10.0.0.1"}, 0)
    with pytest.raises(BatonError, match="runs at 10.0.0.7, where the group worker has no pod"):
        leaving_pod(group, pods, "10.0.0.7", set(), 0)
    assert leaving_pod(group, pods, "10.0.0.1", set(), 1) is None
