"""The chart with orchestrator kuberay and `autoscaling.mode: baton`: roles and number of the
workers in a RayCluster's pods."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.deploy.cli.control_commands import fleet_plan
from baton.deploy.cli.main import parser
from baton.deploy.control.resize_target import ResizeTarget
from baton.deploy.nodes.fleet_plan import FleetOptions
from baton.planner.fleet_size import SizeBounds
from baton.runtime.settings.loading import load
from tests.support.chart import Document, Release, Values, example, merged, render
from tests.support.live_chart import upgraded
from tests.support.pods.secrets_server import SecretsServer

BASE = merged(
    example("cpu-demo"),
    {
        "orchestrator": "kuberay",
        "prefill": {"replicas": 2, "settings": {"step.prefill_tokens": 1024}},
        "decode": {"replicas": 3, "settings": {"step.max_sequences": 16}},
        "autoscaling": {"mode": "baton", "scaleDownSeconds": 90, "baton": {"ttftSeconds": 1.5}},
    },
)
SIZED: Values = {"autoscaling": {"baton": {"maxWorkers": 9}}}
RAYCLUSTER = "chat-baton-ray"


@pytest.fixture(scope="module")
def release() -> Release:
    return render(merged(BASE, SIZED))


def groups(release: Release) -> dict[str, Document]:
    (cluster,) = release.of_kind("RayCluster")
    return {each["groupName"]: each for each in cluster["spec"]["workerGroupSpecs"]}


def bounds(group: Document) -> tuple[int, int, int]:
    return group["replicas"], group["minReplicas"], group["maxReplicas"]


def driver_options(release: Release) -> list[argparse.Namespace]:
    """Return the options of `baton fleet` of each model."""
    (cluster,) = release.of_kind("RayCluster")
    containers = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][1:]
    return [parser().parse_args([*each["command"][1:], *each["args"]]) for each in containers]


def controller_options(release: Release, ending: str = "baton-controller") -> argparse.Namespace:
    pod = release.named("Deployment", ending)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return parser().parse_args([*container["command"][1:], *container["args"]])


def test_workers_are_one_group_that_may_grow(release: Release) -> None:
    found = groups(release)
    assert list(found) == ["worker"] and bounds(found["worker"]) == (5, 5, 9)
    labels = found["worker"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "worker"
    (options,) = driver_options(release)
    assert options.follow and (options.prefill, options.decode) == (2, 3)


def test_pods_of_the_group_take_workers_of_both_roles(release: Release) -> None:
    (options,) = driver_options(release)
    assert not options.by_role and options.group == "worker"
    fleet = FleetOptions(
        config=load(None, {}, {}), settings={}, prefill=2, decode=3, group=options.group
    )
    (resource,) = {name for order in fleet.orders() for name in order.resources()}
    assert groups(release)["worker"]["rayStartParams"]["resources"] == f"'{{\"{resource}\": 1}}'"


def test_a_controller_of_roles_alone_changes_no_number() -> None:
    fixed = render(BASE)
    assert list(groups(fixed)) == ["worker"]
    assert bounds(groups(fixed)["worker"]) == (5, 5, 5)
    assert not driver_options(fixed)[0].follow
    assert controller_options(fixed).resize is None
    assert fixed.of_kind("Role") == [
        each for each in fixed.of_kind("Role") if "controller" not in each["metadata"]["name"]
    ]


def test_pods_have_the_settings_of_both_roles(release: Release) -> None:
    (worker,) = groups(release)["worker"]["template"]["spec"]["containers"]
    given = {each["name"]: each.get("value") for each in worker["env"]}
    assert given["BATON_STEP__PREFILL_TOKENS"] == "1024"
    assert given["BATON_STEP__MAX_SEQUENCES"] == "16"


def test_a_changed_setting_of_a_role_makes_all_pods_old(release: Release) -> None:
    other = render(merged(BASE, SIZED, {"prefill": {"settings": {"step.prefill_tokens": 512}}}))
    for name, group in groups(release).items():
        before, after = (
            each["template"]["metadata"]["annotations"] for each in (group, groups(other)[name])
        )
        assert before != after


def test_a_driver_that_is_to_follow_makes_the_head_old() -> None:
    """`baton release replace` finds its pod by the annotation."""
    heads = [
        render(values).of_kind("RayCluster")[0]["spec"]["headGroupSpec"]["template"]["metadata"]
        for values in (BASE, merged(BASE, SIZED))
    ]
    assert heads[0]["annotations"] != heads[1]["annotations"]


def test_a_controller_knows_its_raycluster_and_how_far(release: Release) -> None:
    plan = fleet_plan(controller_options(release))
    assert plan is not None
    assert plan.target == ResizeTarget("raycluster", RAYCLUSTER, "worker")
    assert plan.bounds == SizeBounds(least=5, most=9, release_s=90.0)


def test_each_model_has_a_controller_of_its_groups() -> None:
    models: Values = {"models": {"code": {"model": {"embedded": True}, "decode": {"replicas": 1}}}}
    release = render(merged(BASE, SIZED, models))
    plan = fleet_plan(controller_options(release, "code-controller"))
    assert plan is not None and plan.bounds == SizeBounds(least=3, most=9, release_s=90.0)
    assert plan.target == ResizeTarget("raycluster", RAYCLUSTER, "code-worker")
    assert list(groups(release)) == ["worker", "code-worker"]
    assert bounds(groups(release)["code-worker"]) == (3, 3, 9)
    drivers = driver_options(release)
    assert [each.follow for each in drivers] == [True, True]
    assert [each.group for each in drivers] == ["worker", "code-worker"]


def test_a_controller_may_touch_one_raycluster_and_list_pods(release: Release) -> None:
    """The right to list cannot be of some pods: Kubernetes has no such rule."""
    rules = release.named("Role", "controller")["rules"]
    assert rules == [
        {
            "apiGroups": ["ray.io"],
            "resources": ["rayclusters"],
            "resourceNames": [release.of_kind("RayCluster")[0]["metadata"]["name"]],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    pod = release.named("Deployment", "controller")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"]
    assert release.of_kind("ClusterRole", "ClusterRoleBinding") == []


def test_policies_let_the_controller_reach_workers_and_the_api(release: Release) -> None:
    policy = release.named("NetworkPolicy", "controller")["spec"]
    reached = {
        name
        for rule in policy["egress"]
        for peer in rule.get("to", [])
        for expression in peer["podSelector"]["matchExpressions"]
        for name in expression["values"]
    }
    assert reached == {"worker", "redis"}
    anywhere = [each for each in policy["egress"] if "to" not in each]
    assert {port["port"] for rule in anywhere for port in rule["ports"]} == {53, 443, 6443}
    (peer,) = release.named("NetworkPolicy", "baton-worker")["spec"]["ingress"][0]["from"]
    (expression,) = peer["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == {"router", "controller", "worker"}


def test_budgets_hold_the_least(release: Release) -> None:
    """One for the workers of both roles: by role it would count pods whose role has changed. One
    that held the most would let no node drain while fewer run."""
    budgets = {e["metadata"]["name"]: e["spec"] for e in release.of_kind("PodDisruptionBudget")}
    assert list(budgets) == ["chat-baton-worker"]
    assert budgets["chat-baton-worker"]["minAvailable"] == 4
    labels = groups(release)["worker"]["template"]["metadata"]["labels"]
    assert budgets["chat-baton-worker"]["selector"]["matchLabels"].items() <= labels.items()


def test_policies_know_no_role(release: Release) -> None:
    """Ray's ports aside, which pods of models with a group for each role may use too."""
    names = {each["metadata"]["name"] for each in release.of_kind("NetworkPolicy")}
    assert "chat-baton-worker" in names
    assert not {name for name in names if name.endswith(("-prefill", "-decode"))}


def test_the_check_of_a_release_asks_all_workers(release: Release) -> None:
    (check,) = release.named("Pod", "test")["spec"]["containers"]
    options = parser().parse_args([*check["command"][1:], *check["args"]])
    assert options.decode == ["http://chat-baton-worker.llm:9001"]
    service = release.named("Service", "baton-worker")["spec"]["selector"]
    labels = groups(release)["worker"]["template"]["metadata"]["labels"]
    assert service.items() <= labels.items()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecretsServer]:
    made = SecretsServer("127.0.0.1", "llm", tmp_path / "api")
    made.roles["user"] = [{"resources": ["rayclusters"], "verbs": ["get"]}]
    yield made
    made.close()


@pytest.mark.parametrize(("live", "kept"), [(6, 6), (1, 5), (40, 9)])
def test_an_upgrade_leaves_the_number(
    server: SecretsServer, tmp_path: Path, live: int, kept: int
) -> None:
    """Helm writes the list of groups as a whole: KubeRay would delete pods with workers."""
    (cluster,) = render(merged(BASE, SIZED)).of_kind("RayCluster")
    cluster = json.loads(json.dumps(cluster))
    leaving = {"workersToDelete": ["chat-baton-ray-worker-worker-x7k2p"]}
    cluster["spec"]["workerGroupSpecs"][0] |= {"replicas": live, "scaleStrategy": leaving}
    server.rayclusters.put(cluster)
    group = groups(upgraded(server, merged(BASE, SIZED), tmp_path))["worker"]
    assert bounds(group) == (kept, 5, 9) and group["scaleStrategy"] == leaving


def test_a_first_install_begins_with_the_least(server: SecretsServer, tmp_path: Path) -> None:
    made = upgraded(server, merged(BASE, SIZED), tmp_path)
    assert bounds(groups(made)["worker"]) == (5, 5, 9)
    assert server.refused == []
