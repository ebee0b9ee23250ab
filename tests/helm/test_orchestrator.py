"""What starts a release's workers: a RayCluster by default, or StatefulSets."""

from __future__ import annotations

from collections import Counter

import pytest

from baton.deploy.cli.main import parser
from tests.support.chart import KUBERAY, PLAIN, Release, example, render
from tests.support.chart_choices import EXAMPLES, drawn_choices, each_choice

BARE = {"model": {"embedded": True}}  # a model has no default
NAMED = {"cpu-demo": "plain", "single-node-8gpu": "plain", "production": "kuberay"}


def names(release: Release, kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in release.of_kind(kind)}


def test_the_default_is_routers_beside_a_raycluster() -> None:
    release = render(BARE)
    assert names(release, "Deployment") == {"chat-baton-router"}
    assert names(release, "StatefulSet") == {"chat-baton-redis", "chat-baton-ray-redis"}
    (cluster,) = release.of_kind("RayCluster")
    spec = cluster["spec"]
    assert [each["groupName"] for each in spec["workerGroupSpecs"]] == ["prefill", "decode"]
    assert [each["replicas"] for each in spec["workerGroupSpecs"]] == [1, 1]
    head = spec["headGroupSpec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in head] == ["ray-head", "fleet"]
    assert "baton router" not in str(cluster)
    assert release == render(KUBERAY)


def test_plain_has_no_part_of_ray() -> None:
    release = render(PLAIN)
    names_of_pools = {"chat-baton-prefill", "chat-baton-decode", "chat-baton-redis"}
    assert names(release, "StatefulSet") == names_of_pools
    assert names(release, "RayCluster") == set()
    assert "ray.io" not in str(release.documents)


def test_notes_tell_how_pods_of_a_raycluster_are_replaced() -> None:
    (command,) = [line for line in render(BARE).notes.splitlines() if "  baton " in line]
    assert command.strip() == "baton release replace chat-baton-ray --namespace llm"
    parser().parse_args(command.split()[1:])
    assert "KubeRay" not in render(PLAIN).notes


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_names_what_starts_its_workers(name: str) -> None:
    assert example(name)["orchestrator"] == NAMED[name]
    assert bool(render(example(name)).of_kind("RayCluster")) == (NAMED[name] == "kuberay")


def test_the_combinations_of_policies_have_both_orchestrators() -> None:
    """tests/helm/test_chart.py renders them: the drawn ones in `make nightly`."""
    drawn = Counter(each["orchestrator"] for each in drawn_choices())
    assert drawn.total() >= 200 and min(drawn["plain"], drawn["kuberay"]) >= 60, drawn
    alone = Counter(each["orchestrator"] for each in each_choice())
    assert min(alone["plain"], alone["kuberay"]) >= 40, alone
