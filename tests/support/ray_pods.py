"""A RayCluster on a stand-in of the Kubernetes API, whose operator acts at once, and its workers'
pods: as many as KubeRay would keep, and deleted as it would delete them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton.deploy.host.raycluster import worker_group
from tests.support.pods.rayclusters import timestamp
from tests.support.pods.secrets_server import SecretsServer
from tests.support.pods.workloads import PodState, ray_group

Document = dict[str, Any]
NAME, GROUP = "chat-baton-ray", "worker"
RULES = [
    {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "resourceNames": [NAME],
     "verbs": ["get", "patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
]  # fmt: skip


def raycluster(workers: int, most: int = 8) -> Document:
    """Return what the chart renders, without templates, beside the group of another model."""
    groups = [
        {"groupName": "code-worker", "replicas": 2, "minReplicas": 2, "maxReplicas": 2},
        {"groupName": GROUP, "replicas": workers, "minReplicas": 2, "maxReplicas": most},
    ]
    return {
        "kind": "RayCluster",
        "metadata": {"name": NAME, "namespace": "llm"},
        "spec": {"workerGroupSpecs": groups},
    }


def pod_name(number: int) -> str:
    return f"{NAME}-{GROUP}-worker-{number}"


def pod_host(number: int) -> str:
    return f"10.0.1.{number}"


@dataclass
class RayPods:
    """The pods of the RayCluster's group, which `put` creates. `slow`: a pod that ends stays until
    `finish`. `waiting`: numbers of pods that have no node, as their status says."""

    server: SecretsServer
    states: list[PodState] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    slow: bool = False
    made: int = 0

    def put(self, document: Document) -> None:
        self.server.rayclusters.pods = self.objects
        self.server.rayclusters.changed = self.operate
        self.operate(self.server.rayclusters.put(document))

    def operate(self, document: Document) -> None:
        """Take the operator's step."""
        group = worker_group(document, GROUP)
        actions = ray_group(group.replicas, group.named, self.states, self.made)
        made = [PodState(pod_name(n), "", n not in self.waiting, False, n) for n in actions.make]
        self.made += len(made)
        kept = []
        for each in self.states:
            if each.name not in actions.end:
                kept.append(each)
            elif self.slow:
                kept.append(PodState(each.name, "", False, True, each.number))
        self.states = kept + made

    def finish(self) -> None:
        """Let the pods that end be gone, and the operator look again."""
        self.states = [each for each in self.states if not each.terminating]
        self.touch()

    def touch(self) -> None:
        """Change the object's version, as the operator does with its status."""
        self.operate(self.server.rayclusters.put(self.server.rayclusters.objects[NAME]))

    def numbers(self) -> list[int]:
        return sorted(each.number for each in self.states if not each.terminating)

    def named(self) -> list[str]:
        """Return the pods that workersToDelete names."""
        return list(worker_group(self.server.rayclusters.objects[NAME], GROUP).named)

    def objects(self) -> list[Document]:
        """Return the pods as the API shows them, beside one of another group."""
        found = [self._object(each, GROUP) for each in self.states]
        return [self._object(PodState("another", "", True, False, 99), "code-worker"), *found]

    def _object(self, state: PodState, group: str) -> Document:
        labels = {"ray.io/cluster": NAME, "ray.io/group": group}
        metadata: Document = {"name": state.name, "labels": labels,
                              "creationTimestamp": timestamp(state.number)}  # fmt: skip
        if state.terminating:
            metadata["deletionTimestamp"] = timestamp(0)
        waits = state.number in self.waiting
        status: Document = {"phase": "Running", "podIP": pod_host(state.number)}
        if waits:
            scheduled = {"type": "PodScheduled", "status": "False", "message": "no node has room"}
            status = {"phase": "Pending", "conditions": [scheduled]}
        return {"metadata": metadata, "status": status}
