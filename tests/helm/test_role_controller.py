"""The chart with `autoscaling.mode: baton`: one group of workers, a controller of their roles."""

from __future__ import annotations

import subprocess

import pytest

from baton.deploy.cli.arguments import config_of
from baton.deploy.cli.control_commands import fleet_plan
from baton.deploy.cli.main import parser
from baton.deploy.control.controller_process import service_goals
from baton.deploy.control.resize_target import ResizeTarget
from baton.planner.fleet_size import SizeBounds
from tests.support.chart import Document, Release, Values, example, merged, render
from tests.support.chart_choices import MONITORED

BASE = merged(
    example("cpu-demo"),
    {
        "prefill": {"replicas": 2, "settings": {"step.prefill_tokens": 1024}},
        "decode": {"replicas": 3, "settings": {"step.max_sequences": 16}},
        "autoscaling": {"mode": "baton", "baton": {"ttftSeconds": 1.5}},
    },
)
COMPONENT = "app.kubernetes.io/component"


def release(**change: object) -> Release:
    return render(merged(BASE, change))


def container_of(document: Document) -> Document:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_workers_are_one_group() -> None:
    found = release()
    pools = [
        each for each in found.of_kind("StatefulSet") if container_of(each)["name"] == "worker"
    ]
    assert [each["metadata"]["name"] for each in pools] == ["chat-baton-worker"]
    assert pools[0]["spec"]["replicas"] == 5
    assert found.of_kind("HorizontalPodAutoscaler", "ScaledObject") == []
    service = found.named("Service", "worker")
    assert pools[0]["spec"]["serviceName"] == service["metadata"]["name"]


@pytest.mark.parametrize(
    ("ordinal", "role"), [(0, "prefill"), (1, "prefill"), (2, "decode"), (10, "decode")]
)
def test_the_first_pods_begin_as_prefill_workers(ordinal: int, role: str) -> None:
    container = container_of(release().named("StatefulSet", "worker"))
    pod = f"chat-baton-worker-{ordinal}"
    script, *given = container["args"]
    shown = script.replace("exec baton", "printf '%s\\n'")
    arguments = [
        each.replace("$(POD_NAME)", pod).replace("$(POD_IP)", "10.0.0.1") for each in given
    ]
    done = subprocess.run([*container["command"], shown, *arguments], env={"POD_NAME": pod},
                          capture_output=True, text=True, check=True)  # fmt: skip
    options = parser().parse_args(done.stdout.splitlines())
    assert (options.command, options.role, options.worker_id) == ("worker", role, pod)


def test_workers_have_the_settings_of_both_roles() -> None:
    arguments = container_of(release().named("StatefulSet", "worker"))["args"]
    assert {"--set=step.prefill_tokens=1024", "--set=step.max_sequences=16"} <= set(arguments)


def test_the_controller_acts_for_the_given_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = release().named("Deployment", "controller")
    container = container_of(controller)
    assert controller["spec"]["replicas"] == 2
    for variable in container["env"]:
        if variable["name"].startswith("BATON_"):
            monkeypatch.setenv(variable["name"], variable.get("value", "a-key"))
    options = parser().parse_args([*container["command"][1:], *container["args"]])
    config = config_of(options)
    assert options.act and options.port == container["ports"][0]["containerPort"]
    assert config.registry.location.startswith("rediss://")  # the lock of its leader
    goals = service_goals(config)
    assert (goals.ttft_s, goals.itl_s, goals.max_sequences) == (1.5, float("inf"), 16)


def test_a_controller_that_moves_roles_has_no_rights() -> None:
    found = release()
    pod = found.named("Deployment", "controller")["spec"]["template"]["spec"]
    account = found.named("ServiceAccount", "controller")
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert not pod["automountServiceAccountToken"] and not account["automountServiceAccountToken"]
    bound = [each["subjects"] for each in found.of_kind("RoleBinding", "ClusterRoleBinding")]
    assert account["metadata"]["name"] not in str(bound)


def resized(**change: object) -> Release:
    """The release whose controller changes the number of workers, too."""
    return release(autoscaling={"scaleDownSeconds": 90, "baton": {"maxWorkers": 9}}, **change)


def test_a_controller_that_resizes_may_touch_one_scale() -> None:
    """The rights that it needs, and no other: of one subresource of one object, and to read the
    pods that this may have."""
    found = resized()
    pod = found.named("Deployment", "controller")["spec"]["template"]["spec"]
    account = found.named("ServiceAccount", "controller")
    assert pod["automountServiceAccountToken"] and not account["automountServiceAccountToken"]
    name = found.named("StatefulSet", "worker")["metadata"]["name"]
    assert found.named("Role", "controller")["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": [name],
            "verbs": ["get", "patch"],
        },
        {
            "apiGroups": [""],
            "resources": ["pods"],
            "resourceNames": [f"{name}-{number}" for number in range(9)],
            "verbs": ["get"],
        },
    ]
    binding = found.named("RoleBinding", "controller")
    assert binding["roleRef"]["name"] == found.named("Role", "controller")["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "llm"}
    ]
    assert found.of_kind("ClusterRole", "ClusterRoleBinding") == []


def test_a_controller_that_resizes_knows_what_and_how_far() -> None:
    found = resized(workers={"startupSeconds": 700})
    container = container_of(found.named("Deployment", "controller"))
    options = parser().parse_args([*container["command"][1:], *container["args"]])
    plan = fleet_plan(options)
    assert plan is not None
    name = found.named("StatefulSet", "worker")["metadata"]["name"]
    assert plan.target == ResizeTarget("statefulset", name)
    assert plan.bounds == SizeBounds(least=5, most=9, release_s=90.0)
    assert plan.start_s == 700.0


def test_the_number_of_workers_is_left_to_what_changes_it() -> None:
    """`helm upgrade` would set it back."""
    assert "replicas" not in resized().named("StatefulSet", "worker")["spec"]
    assert release().named("StatefulSet", "worker")["spec"]["replicas"] == 5


def test_a_controller_that_resizes_reaches_the_api() -> None:
    for found, ports in ((resized(), {443, 6443}), (release(), set())):
        rules = found.named("NetworkPolicy", "controller")["spec"]["egress"]
        anywhere = [each for each in rules if "to" not in each]
        opened = {port["port"] for rule in anywhere for port in rule["ports"]}
        assert opened - {53} == ports


def test_the_api_is_reached_at_the_ports_that_are_given() -> None:
    """As a policy sees them, behind the API's Service: those of MicroK8s here."""
    found = resized(networkPolicy={"apiPorts": [16443]})
    for name in ("controller", "secrets"):
        rules = found.named("NetworkPolicy", name)["spec"]["egress"]
        opened = {port["port"] for rule in rules if "to" not in rule for port in rule["ports"]}
        assert opened - {53} == {16443}


def reached(policy: Document) -> set[str]:
    """Return the components that a policy lets its pods call."""
    return {
        name
        for rule in policy["spec"]["egress"]
        for peer in rule.get("to", [])
        for expression in peer["podSelector"]["matchExpressions"]
        for name in expression["values"]
    }


def test_policies_and_budgets_know_no_role() -> None:
    found = release(**MONITORED)
    budgets = {each["metadata"]["name"] for each in found.of_kind("PodDisruptionBudget")}
    assert budgets == {"chat-baton-worker"}
    policies = found.of_kind("NetworkPolicy")
    assert "prefill" not in str(policies) and "decode" not in str(policies)
    assert reached(found.named("NetworkPolicy", "controller")) == {"worker", "redis"}
    ingress = found.named("NetworkPolicy", "worker")["spec"]["ingress"][0]["from"]
    (expression,) = ingress[0]["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == {"router", "controller", "worker"}
    monitored = {each["metadata"]["labels"][COMPONENT] for each in found.of_kind("PodMonitor")}
    assert monitored == {"router", "worker", "controller"}


@pytest.mark.parametrize(
    ("tls", "secrets"),
    [
        ({"mode": "hook"}, {"chat-baton-decode-tls", "chat-baton-router-tls"}),
        (
            {
                "mode": "existing",
                "existingSecrets": {"router": "a", "prefill": "b", "decode": "c", "redis": "d"},
            },
            {"a", "c"},
        ),
    ],
)
def test_certificates_are_those_of_the_roles(tls: Values, secrets: set[str]) -> None:
    found = release(tls=tls)
    mounted = {
        volume["secret"]["secretName"]
        for labels, pod in found.pods()
        if labels.get(COMPONENT) in ("worker", "controller")
        for volume in pod["volumes"]
        if volume["name"] == "tls"
    }
    assert mounted == secrets


def test_the_check_of_a_release_asks_all_workers() -> None:
    found = release()
    (check,) = found.named("Pod", "test")["spec"]["containers"]
    assert "--decode=http://chat-baton-worker.llm:9001" in check["args"]
