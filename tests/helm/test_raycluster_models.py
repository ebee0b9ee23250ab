"""Several models with orchestrator kuberay: one RayCluster, a driver and a group for each role."""

from __future__ import annotations

from collections.abc import Mapping

import helm_python
import pytest

from baton.deploy.cli.main import parser
from baton.deploy.nodes.fleet_plan import FleetOptions
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime.settings.loading import load
from tests.support.chart import Document, Release, Values, example, merged, nested, render
from tests.support.chart_choices import MONITORED
from tests.support.json_values import Json

MODELS: Values = {
    "big": {
        "model": {"repository": "owner/name", "revision": "0a1b2c"},
        "prefill": {"replicas": 2},
        "decode": {"replicas": 3, "gpu": {"count": 1}, "settings": {"worker.device": "cuda"}},
        "workers": {"port": 9100},
    },
    "tiny": {"model": {"embedded": True, "name": "b"}},
}
BASE = merged(example("cpu-demo"), {"orchestrator": "kuberay", "models": MODELS})
NAMES = ("", "big", "tiny")
APP = "app.kubernetes.io/name"


@pytest.fixture(scope="module")
def release() -> Release:
    return render(merged(BASE, MONITORED))


def cluster_of(release: Release) -> Document:
    (cluster,) = release.of_kind("RayCluster")
    return dict(cluster["spec"])


def groups_of(release: Release) -> dict[str, Document]:
    return {each["groupName"]: each for each in cluster_of(release)["workerGroupSpecs"]}


def drivers_of(release: Release) -> dict[str, Document]:
    """Return the container of each model's driver."""
    containers = cluster_of(release)["headGroupSpec"]["template"]["spec"]["containers"]
    return {each["name"].removeprefix("fleet").lstrip("-"): each for each in containers[1:]}


def environment_of(container: Document) -> dict[str, str]:
    return {each["name"]: each.get("value", "a-secret") for each in container["env"]}


def orders_of(container: Document) -> list[WorkerOrder]:
    """Return what a driver asks of Ray."""
    given = parser().parse_args([*container["command"][1:], *container["args"]])
    fleet = FleetOptions(
        config=load(None, environment_of(container), {}), settings={}, prefill=given.prefill,
        decode=given.decode, model=given.model, cpus=given.cpus, prefill_gpus=given.prefill_gpus,
        decode_gpus=given.decode_gpus, by_role=given.by_role, group=given.group,
    )  # fmt: skip
    fleet.check()
    return fleet.orders()


def test_each_model_has_a_group_of_each_role(release: Release) -> None:
    assert {name: each["replicas"] for name, each in groups_of(release).items()} == {
        "prefill": 1, "decode": 1, "big-prefill": 2, "big-decode": 3, "tiny-prefill": 1,
        "tiny-decode": 1,
    }  # fmt: skip
    for name, group in groups_of(release).items():
        model, _, role = name.rpartition("-")
        labels = group["template"]["metadata"]["labels"]
        assert labels[APP] == (f"baton-model-{model}" if model else "baton")
        assert labels["app.kubernetes.io/component"] == role
        service = release.named("Service", f"baton-{name}")["spec"]["selector"]
        assert service.items() <= labels.items()
    worker = groups_of(release)["big-decode"]["template"]["spec"]["containers"][0]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert environment_of(worker)["BATON_WORKER__PORT"] == "9100"


def test_each_driver_places_its_model_s_workers_alone(release: Release) -> None:
    drivers, groups = drivers_of(release), groups_of(release)
    assert list(drivers) == list(NAMES)
    clusters = {name: environment_of(each)["BATON_REGISTRY__CLUSTER"] for name, each in
                drivers.items()}  # fmt: skip
    own = "llm_chat-baton"
    assert clusters == {"": own, "big": f"{own}-big", "tiny": f"{own}-tiny"}
    for model, driver in drivers.items():
        orders = orders_of(driver)
        assert {each.cluster for each in orders} == {clusters[model]}
        for role in ("prefill", "decode"):
            mine = [each for each in orders if each.role == role]
            group = groups[f"{model}-{role}" if model else role]
            parameters = group["rayStartParams"]
            assert len(mine) == group["replicas"]
            for order in mine:
                (name,) = order.resources()
                assert parameters["resources"] == f"'{{\"{name}\": 1}}'"
                assert float(parameters["num-gpus"]) == order.gpus
            worker = group["template"]["spec"]["containers"][0]
            assert environment_of(worker)["BATON_REGISTRY__CLUSTER"] == clusters[model]
    wanted = [set(each.resources()) for name in NAMES for each in orders_of(drivers[name])[:1]]
    assert len(set().union(*wanted)) == len(NAMES)
    assert orders_of(drivers["big"])[0].model == "/models/owner--name@0a1b2c"


def test_drivers_have_ports_of_their_own_that_are_scraped(release: Release) -> None:
    ports = {}
    for model, driver in drivers_of(release).items():
        given = parser().parse_args([*driver["command"][1:], *driver["args"]])
        (port,) = driver["ports"]
        assert port["containerPort"] == given.admin_port
        assert driver["livenessProbe"]["httpGet"]["port"] == port["name"]
        ports[model] = given.admin_port, port["name"]
    assert len({*ports.values()}) == len(NAMES)
    (monitor,) = [each for each in release.of_kind("PodMonitor")
                  if each["metadata"]["name"].endswith("ray-head")]  # fmt: skip
    scraped = [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]]
    assert sorted(scraped) == sorted(name for _, name in ports.values())
    ingress = release.named("NetworkPolicy", "ray-head")["spec"]["ingress"]
    admitted = [rule["port"] for rule in ingress[-1]["ports"]]
    assert admitted == [number for number, _ in ports.values()]


def peers(rule: Document) -> set[str]:
    return {each["podSelector"]["matchLabels"][APP] for each in rule.get("from", rule.get("to"))}


def rules_at(policy: Document, direction: str, port: int) -> list[Document]:
    return [
        rule
        for rule in policy["spec"][direction]
        if any(each["port"] == port for each in rule["ports"])
    ]


def test_only_ports_of_ray_are_open_between_models(release: Release) -> None:
    every = {"baton", "baton-model-big", "baton-model-tiny"}
    for ending in ("ray-head", "baton-decode", "big-decode", "tiny-prefill"):
        policy = release.named("NetworkPolicy", ending)
        for direction in ("ingress", "egress"):
            (of_ray,) = [
                rule
                for rule in rules_at(policy, direction, 10002)
                if rule["ports"][0].get("endPort") == 6381
            ]
            assert peers(of_ray) == every
    for port in (9100, 20000):
        (rule,) = rules_at(release.named("NetworkPolicy", "big-decode"), "ingress", port)
        assert peers(rule) == {"baton-model-big"}
    head = release.named("NetworkPolicy", "ray-head")
    for port in (9000, 9100):  # drivers leave their workers: they order none to drain
        assert rules_at(head, "egress", port) == []
    assert all("--leave-workers" in each["args"] for each in drivers_of(release).values())
    names = [each["metadata"]["name"] for each in release.of_kind("NetworkPolicy")]
    assert [name for name in names if "ray-" in name] == [
        "chat-baton-ray-head", "chat-baton-ray-redis"
    ]  # fmt: skip


def definitions(values: Mapping[str, Json]) -> dict[str, str]:
    release = render(dict(values))
    templates = {name: each["template"] for name, each in groups_of(release).items()}
    templates["head"] = cluster_of(release)["headGroupSpec"]["template"]
    return {
        name: each["metadata"]["annotations"]["baton/definition"]
        for name, each in templates.items()
    }


@pytest.mark.parametrize(
    ("path", "value", "changed"),
    [
        ("models.big.workers.settings", {"pool.blocks": 99}, {"head", "big-prefill", "big-decode"}),
        ("models.big.decode.nodeSelector", {"gpu": "h200"}, {"head", "big-decode"}),
        ("models.tiny.decode.replicas", 4, {"head"}),
        ("decode.nodeSelector", {"gpu": "b200"}, {"head", "decode", "tiny-decode", "big-decode"}),
        ("model.name", "other", {"head", "prefill", "decode"}),
    ],
)
def test_a_model_s_change_replaces_no_pod_of_another(
    path: str, value: object, changed: set[str]
) -> None:
    before, after = definitions(BASE), definitions(merged(BASE, nested(path, value)))
    assert {name for name in before if before[name] != after[name]} == changed


def test_a_model_more_replaces_the_head_alone() -> None:
    fewer = {**BASE, "models": {"big": MODELS["big"]}}
    before, after = definitions(fewer), definitions(BASE)
    assert {name for name, each in before.items() if after[name] != each} == {"head"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workers": {"adminPort": 6378}}, "models.big: orchestrator is kuberay, and 6379 is a"),
        ({"models": {"tiny": {"workers": {"port": 9003}}}}, "models.tiny: workers.port is 9003"),
        (
            {"models": {"big": {"autoscaling": {"mode": "hpa"}}}},
            "models.big: autoscaling.mode is hpa, but orchestrator is kuberay",
        ),
    ],
)
def test_a_bad_value_of_a_model_is_named(change: Values, words: str) -> None:
    with pytest.raises(helm_python.HelmError, match=words):
        render(merged(BASE, change))
