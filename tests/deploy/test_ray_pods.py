"""`baton release replace`: which pod of a RayCluster goes next, and what is done to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.deploy.host.raycluster import worker_group
from baton.deploy.nodes import pod_replacement
from baton.deploy.nodes.pod_replacement import Replacement, kubectl_in
from baton.deploy.nodes.ray_pods import (
    DEFINITION,
    NextStep,
    RayPod,
    deletion_patch,
    next_step,
    pods_of,
)
from baton.runtime.errors import BatonError, ConfigError, Unavailable
from tests.support.ray_pods import Document

DRAIN = ["baton", "release", "leave", "--within=9"]
OLD = RayPod("decode-1", "decode", False, True, False)


def template(definition: str) -> Document:
    container = {"name": "worker", "lifecycle": {"preStop": {"exec": {"command": DRAIN}}}}
    metadata = {"annotations": {DEFINITION: definition}}
    return {"metadata": metadata, "spec": {"containers": [container]}}


def raycluster(prefill: int = 2, decode: int = 2, definition: str = "new") -> Document:
    groups = [
        {"groupName": name, "replicas": count, "template": template(definition)}
        for name, count in (("prefill", prefill), ("decode", decode))
    ]
    head = {"template": template(definition)}
    return {"spec": {"headGroupSpec": head, "workerGroupSpecs": groups}}


def pod(name: str, definition: str = "new", ready: bool = True, ending: bool = False) -> Document:
    kind, group = ("head", "headgroup") if name == "head" else ("worker", name.rpartition("-")[0])
    made = template(definition)
    made["metadata"] |= {"name": name, "labels": {"ray.io/node-type": kind, "ray.io/group": group}}
    if ending:
        made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    made["status"] = {
        "conditions": [{"type": "Ready", "status": str(ready)}],
        "containerStatuses": [{"name": "worker", "ready": ready}],
    }
    return made


def step(cluster: Document, *pods: Document) -> NextStep:
    return next_step(cluster, pods_of(cluster, {"items": list(pods)}))


def test_roles_take_turns_behind_the_head() -> None:
    cluster, order = raycluster(), []
    state = dict.fromkeys(("decode-1", "decode-2", "head", "prefill-1", "prefill-2"), "old")
    while (found := step(cluster, *(pod(*each) for each in state.items()))).pod is not None:
        order.append(found.pod.name)
        state[found.pod.name] = "new"
    assert order == ["head", "prefill-1", "decode-1", "prefill-2", "decode-2"]
    assert found == NextStep()


def test_roles_of_all_models_take_turns() -> None:
    cluster, order = raycluster(1, 1), []
    groups = cluster["spec"]["workerGroupSpecs"]
    groups += [{**each, "groupName": f"code-{each['groupName']}"} for each in groups]
    state = {f"{each['groupName']}-1": "old" for each in groups} | {"head": "new"}
    while (found := step(cluster, *(pod(*each) for each in state.items()))).pod is not None:
        order.append(found.pod.name)
        state[found.pod.name] = "new"
    assert order == ["code-prefill-1", "prefill-1", "code-decode-1", "decode-1"]


@pytest.mark.parametrize(
    ("pods", "waits_for"),
    [
        ([pod("head"), pod("decode-1", "old", ending=True)], "decode-1 to end"),
        ([pod("decode-1", "old")], "the group head to have 1 pods, it has 0"),
        ([pod("head")], "the group decode to have 1 pods, it has 0"),
        ([pod("head"), pod("decode-1", "old"), pod("decode-2")], "1 pods, it has 2"),
        ([pod("head", ready=False), pod("decode-1", "old")], "head to be ready"),
    ],
)
def test_no_pod_is_replaced_before_the_others_are_ready(
    pods: list[Document], waits_for: str
) -> None:
    found = step(raycluster(0, 1), *pods)
    assert found.pod is None and waits_for in found.waits_for


@pytest.mark.parametrize("ending", [False, True])
def test_an_old_head_waits_for_no_worker(ending: bool) -> None:
    """Pods of a new group, or more of one, get workers from a new head's driver alone."""
    more = [pod("decode-1", "old", ending=ending), pod("decode-2", ready=False)]
    found = step(raycluster(0, 3), pod("head", "old"), *more)
    assert found.pod is not None and found.pod.name == "head"
    assert step(raycluster(0, 3), pod("head", "old", ending=True), *more).waits_for


def test_an_old_pod_that_is_not_ready_goes_first() -> None:
    broken = pod("decode-2", "old", ready=False)
    found = step(raycluster(0, 2), pod("head"), pod("decode-1", "old"), broken)
    assert found.pod is not None and found.pod.name == "decode-2"


def test_a_head_whose_driver_waits_for_a_broken_worker_is_ready() -> None:
    """Else the old pod, whose worker cannot start, would never be replaced by the new one."""
    head = pod("head")
    head["status"]["conditions"][0]["status"] = "False"
    head["status"]["containerStatuses"].append({"name": "fleet", "ready": False})
    found = step(raycluster(0, 1), head, pod("decode-1", "old", ready=False))
    assert found.pod is not None and found.pod.name == "decode-1"


def test_pods_of_another_group_are_left_alone() -> None:
    assert step(raycluster(0, 0), pod("head"), pod("other-1", "old")) == NextStep()


def test_a_raycluster_without_annotations_is_refused() -> None:
    with pytest.raises(ConfigError, match="no annotation baton/definition"):
        pods_of(raycluster(definition=""), {"items": []})


def test_a_raycluster_of_another_chart_is_refused() -> None:
    """Templates need no metadata, and a RayCluster needs no groups of workers."""
    foreign = {"spec": {"headGroupSpec": {"template": {"spec": {"containers": []}}}}}
    with pytest.raises(ConfigError, match="the group head .* has no annotation"):
        pods_of(foreign, {"items": []})


def test_the_patch_names_the_pod_in_its_own_group() -> None:
    patch = deletion_patch(raycluster(), OLD, [OLD])
    assert patch == [
        {"op": "test", "path": "/spec/workerGroupSpecs/1/groupName", "value": "decode"},
        {"op": "test", "path": "/spec/workerGroupSpecs/1/replicas", "value": 2},
        {
            "op": "add",
            "path": "/spec/workerGroupSpecs/1/scaleStrategy",
            "value": {"workersToDelete": ["decode-1"]},
        },
    ]


def test_names_of_pods_that_have_not_ended_stay() -> None:
    """KubeRay counts a pod that ends and is not named, and deletes another one for it."""
    cluster = raycluster()
    cluster["spec"]["workerGroupSpecs"][1]["scaleStrategy"] = {"workersToDelete": ["gone", "ends"]}
    ends = RayPod("ends", "decode", False, False, True)
    assert deletion_patch(cluster, OLD, [OLD, ends])[-1]["value"] == {
        "workersToDelete": ["ends", "decode-1"]
    }


@pytest.mark.parametrize(
    ("bounds", "written", "kept"),
    [
        ({}, 2, 2),
        ({"minReplicas": 3}, 2, 3),
        ({"maxReplicas": 1}, 2, 1),
        ({"minReplicas": 3}, None, 3),
        ({}, None, 0),
    ],
)
def test_a_group_s_number_is_what_kuberay_keeps(
    bounds: Document, written: int | None, kept: int
) -> None:
    cluster = raycluster()
    cluster["spec"]["workerGroupSpecs"][1] |= {**bounds, "replicas": written}
    found = worker_group(cluster, "decode")
    assert (found.replicas, found.written) == (kept, written)
    operations = [(each["op"], each["value"]) for each in found.patch(replicas=4)]
    tested = [] if written is None else [("test", written)]
    assert operations == [("test", "decode"), *tested, ("add", 4)]


def test_a_group_that_is_not_there_is_named() -> None:
    with pytest.raises(BatonError, match="has no group other, it has prefill, decode"):
        worker_group(raycluster(), "other")


class ScriptedCluster:
    """Answers as kubectl; a pod that is deleted has a successor at the `later`th look after."""

    def __init__(self, *pods: Document, later: int = 1, drains: bool = True) -> None:
        self.pods = {each["metadata"]["name"]: each for each in pods}
        self.calls: list[tuple[str, ...]] = []
        self._later, self._drains = later, drains
        self.refuses = False  # patches
        self._made: list[tuple[int, str, str]] = []  # looks to go, old name, new name

    def kubectl(self, words: Sequence[str], within_s: float) -> str:
        if words[0] != "get":
            self.calls.append(tuple(words))
            self._act(words)
            return ""
        if words[1] == "raycluster":
            return json.dumps(raycluster(1, 1))
        self._look()
        return json.dumps({"items": list(self.pods.values())})

    def _act(self, words: Sequence[str]) -> None:
        if words[0] == "exec" and not self._drains:
            raise Unavailable("a worker has not ended within 9 s")
        if words[0] == "patch" and self.refuses:
            raise Unavailable("`kubectl patch` failed: the number was changed")
        if words[0] == "patch":
            name = json.loads(words[-1])[-1]["value"]["workersToDelete"][-1]
            self._made.append((self._later, name, f"{name}x"))
        elif words[0] == "delete":
            self._made.append((self._later, words[2], words[2]))

    def _look(self) -> None:
        for at, (looks, old, new) in enumerate(self._made):
            self._made[at] = (looks - 1, old, new)
            if looks == 0:
                del self.pods[old]
                self.pods[new] = pod(new)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_replacement, "POLL_S", 0.0)


def test_each_worker_drains_before_its_pod_is_named(quick: None) -> None:
    old = [pod("head", "old"), pod("prefill-1", "old"), pod("decode-1", "old")]
    cluster = ScriptedCluster(*old, later=3)
    said: list[str] = []
    assert Replacement("ray", 60.0, cluster.kubectl, said.append).run() == 3
    assert [each[:2] for each in cluster.calls] == [
        ("delete", "pod"),
        ("exec", "prefill-1"), ("patch", "raycluster"),
        ("exec", "decode-1"), ("patch", "raycluster"),
    ]  # fmt: skip
    assert cluster.calls[1] == ("exec", "prefill-1", "-c", "worker", "--", *DRAIN)
    assert "waiting for prefill-1 to be deleted by the operator" in said
    assert Replacement("ray", 60.0, cluster.kubectl, said.append).run() == 0


def test_a_worker_that_does_not_drain_keeps_its_pod(quick: None) -> None:
    cluster = ScriptedCluster(pod("head"), pod("prefill-1", "old"), pod("decode-1"), drains=False)
    with pytest.raises(Unavailable, match="has not ended within 9 s"):
        Replacement("ray", 60.0, cluster.kubectl).run()
    assert [each[0] for each in cluster.calls] == ["exec"]


def test_a_refused_patch_says_that_the_worker_has_drained(quick: None) -> None:
    cluster = ScriptedCluster(pod("head"), pod("prefill-1", "old"), pod("decode-1"))
    cluster.refuses = True
    with pytest.raises(Unavailable, match="the number was changed; its worker .* run this again"):
        Replacement("ray", 60.0, cluster.kubectl).run()
    cluster.refuses = False
    assert Replacement("ray", 60.0, cluster.kubectl).run() == 1


def test_a_pod_without_a_successor_ends_the_wait(quick: None) -> None:
    cluster = ScriptedCluster(pod("head"), pod("prefill-1", "old"), pod("decode-1"), later=1 << 30)
    with pytest.raises(Unavailable, match="waited 0.1 s for prefill-1 to be deleted"):
        Replacement("ray", 0.1, cluster.kubectl).run()


def test_errors_of_kubectl_name_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="not on PATH"):
        kubectl_in("llm")(("get", "pods"), 5.0)
    program = tmp_path / "kubectl"
    program.write_text('#!/bin/sh\necho "no $*" >&2\nexit 1\n')
    program.chmod(0o755)
    with pytest.raises(Unavailable, match="`kubectl -n llm get pods` failed: no -n llm get pods"):
        kubectl_in("llm")(("get", "pods"), 5.0)
