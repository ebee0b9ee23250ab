"""The documented steps of an upgrade to workers that cannot exchange KV with the old ones: at each
moment a prefill and a decode worker of one version are ready, whichever role is quicker."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import helm_python
import pytest

from tests.support.chart import Document, Values, example, merged, render
from tests.support.pods.workloads import PodState, next_actions, revision_of, settled

ROLES = ("prefill", "decode")
SCALED: Values = {"autoscaling": {"mode": "baton", "baton": {"ttftSeconds": 2}}}
ORDERS = {
    "prefill first": ("prefill", "decode"),
    "decode first": ("decode", "prefill"),
}


def rendered(replicas: int, partitions: Sequence[int]) -> dict[str, Document]:
    pools: Values = {
        role: {"replicas": replicas, "partition": partition}
        for role, partition in zip(ROLES, partitions, strict=True)
    }
    release = render(merged(example("cpu-demo"), pools))
    return {role: release.named("StatefulSet", role) for role in ROLES}


def rolled(document: Document, pods: list[PodState]) -> Iterator[list[PodState]]:
    """Yield a StatefulSet's pods after each event, until nothing is left to do."""
    revision = revision_of(document["spec"]["template"])
    while not settled(document, pods):
        actions = next_actions(document, pods, 0)
        for name in actions.end:
            pods = [replace(e, ready=False) if e.name == name else e for e in pods]
            yield pods
            pods = [each for each in pods if each.name != name]
        for number in actions.make:
            pods = [*pods, PodState(f"p-{number}", revision, ready=True, terminating=False,
                                    number=number)]  # fmt: skip
        yield pods


def moments(
    steps: Sequence[dict[str, Document]], replicas: int, order: Sequence[str]
) -> Iterator[dict[str, list[PodState]]]:
    """Yield all pods at each moment of an upgrade in which one role is always the quicker."""
    pods = {
        role: [PodState(f"p-{n}", "old", ready=True, terminating=False, number=n)
               for n in range(replicas)]
        for role in ROLES
    }  # fmt: skip
    for documents in steps:
        for role in order:
            for state in rolled(documents[role], pods[role]):
                pods = pods | {role: state}
                yield pods


def paired(pods: dict[str, list[PodState]]) -> bool:
    """Return whether a version has a worker of each role. Both templates are new: the revisions of
    the two StatefulSets are different names of it."""
    versions = [{e.revision == "old" for e in pods[role] if e.ready} for role in ROLES]
    return bool(versions[0] & versions[1])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_the_steps_keep_a_pair(replicas: int, order: str) -> None:
    half = replicas // 2
    steps = [rendered(replicas, each) for each in ((half, half), (half, 0), (0, 0))]
    states = list(moments(steps, replicas, ORDERS[order]))
    assert all(paired(pods) for pods in states)
    assert not any(each.revision == "old" for role in ROLES for each in states[-1][role])
    at_once = moments([rendered(replicas, (0, 0))], replicas, ORDERS[order])
    assert not all(paired(pods) for pods in at_once)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"orchestrator": "kuberay"},
            "decode.partition is 1, but orchestrator is kuberay, where an upgrade replaces no pod; "
            "set it to 0: `baton release replace` takes the roles in turn",
        ),
        (
            {"orchestrator": "kuberay", **SCALED},
            "decode.partition is 1, but orchestrator is kuberay, where an upgrade replaces no pod; "
            "set it to 0: `baton release replace` takes pods",
        ),
        (
            SCALED,
            "decode.partition is 1, but autoscaling.mode is baton, where both roles are one "
            "StatefulSet; set it to 0",
        ),
    ],
)
@pytest.mark.parametrize("of_a_model", [False, True])
def test_a_partition_is_refused_where_it_says_nothing(
    values: Values, said: str, of_a_model: bool
) -> None:
    """The value of a further model is named with that model."""
    asked: Values = {"decode": {"partition": 1}}
    if of_a_model:
        asked = {"models": {"big": {"model": {"embedded": True}, **asked}}}
        said = f"models.big: {said}"
    with pytest.raises(helm_python.HelmError, match=f"(^|: ){re.escape(said)}$"):
        render(merged(example("cpu-demo"), values, asked))
