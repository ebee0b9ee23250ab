"""The chart's autoscalers: one of a kind for each role, by metrics that its workers have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from baton.runtime import metrics
from tests.support.chart import Document, Release, Values, example, merged, render
from tests.support.chart_choices import MONITORED

BASE = merged(
    example("cpu-demo"),
    MONITORED,
    {"prefill": {"replicas": 2}, "decode": {"replicas": 1}},
)
MODES: dict[str, Values] = {
    "hpa": {"mode": "hpa"},
    "keda": {"mode": "keda", "keda": {"prometheus": "http://prometheus:9090"}},
}
KINDS = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
PROMETHEUS_METRICS = {  # by role
    "prefill": {"baton_queued_tokens"},
    "decode": {"baton_kv_use_ratio", "baton_waiting_requests"},
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def scaled(mode: str, **change: object) -> Release:
    return render(merged(BASE, {"autoscaling": MODES[mode]}, {"autoscaling": change}))


def metric_names(document: Document) -> Iterator[str]:
    for metric in document["spec"].get("metrics", []):
        yield metric["pods"]["metric"]["name"]
    for trigger in document["spec"].get("triggers", []):
        yield from re.findall(r"baton_\w+", trigger["metadata"]["query"])


def test_there_is_no_autoscaler_by_default() -> None:
    release = render(BASE)
    assert release.of_kind(*KINDS.values()) == []
    assert release.named("StatefulSet", "prefill")["spec"]["replicas"] == 2


def test_each_role_has_one_autoscaler_of_the_mode(mode: str) -> None:
    release = scaled(mode)
    found = release.of_kind(*KINDS.values())
    assert [each["kind"] for each in found] == [KINDS[mode]] * 2
    targets = [each["spec"]["scaleTargetRef"]["name"] for each in found]
    assert targets == ["chat-baton-prefill", "chat-baton-decode"]
    for name in targets:
        pool = release.named("StatefulSet", name.rpartition("-")[2])
        assert pool["metadata"]["name"] == name and "replicas" not in pool["spec"]


def test_replicas_are_the_least_and_max_replicas_the_most(mode: str) -> None:
    release = scaled(mode, prefill={"maxReplicas": 5})
    spec = release.named(KINDS[mode], "prefill")["spec"]
    assert spec.get("minReplicas", spec.get("minReplicaCount")) == 2
    assert spec.get("maxReplicas", spec.get("maxReplicaCount")) == 5


def test_roles_scale_by_metrics_that_exist(mode: str) -> None:
    gauges = {
        value.describe()[0].name for value in vars(metrics).values() if hasattr(value, "describe")
    }
    for role, wanted in PROMETHEUS_METRICS.items():
        assert set(metric_names(scaled(mode).named(KINDS[mode], role))) == wanted <= gauges


def test_queries_select_the_pods_of_one_role() -> None:
    spec = scaled("keda").named("ScaledObject", "decode")["spec"]
    for trigger in spec["triggers"]:
        query = trigger["metadata"]["query"]
        namespace, pods = re.findall(r'namespace="([^"]+)",pod=~"([^"]+)"', query)[0]
        assert namespace == "llm" and re.fullmatch(pods, "chat-baton-decode-12")
        assert not re.fullmatch(pods, "chat-baton-prefill-0")
        assert not re.fullmatch(pods, "chat-baton-decode-0-x")


def test_targets_are_the_given_ones() -> None:
    change = {"prefill": {"queuedTokens": 5000}, "decode": {"kvUsePercent": 55}}
    hpa = scaled("hpa", **change)
    pods = [each["pods"] for each in hpa.named(KINDS["hpa"], "decode")["spec"]["metrics"]]
    assert [each["target"]["averageValue"] for each in pods] == ["550m", "1"]
    keda = scaled("keda", **change)
    triggers = keda.named(KINDS["keda"], "decode")["spec"]["triggers"]
    assert [each["metadata"]["threshold"] for each in triggers] == ["0.55", "1"]
    (trigger,) = keda.named(KINDS["keda"], "prefill")["spec"]["triggers"]
    assert trigger["metadata"]["threshold"] == "5000" and trigger["metricType"] == "AverageValue"


def test_a_silent_prometheus_scales_nothing_down() -> None:
    spec = scaled("keda").named("ScaledObject", "prefill")["spec"]
    assert spec["fallback"]["behavior"] == "currentReplicas"
    assert [each["metadata"]["ignoreNullValues"] for each in spec["triggers"]] == ["false"]
    assert spec["minReplicaCount"] >= 1  # a fleet without a role serves nothing


def test_workers_leave_one_by_one_and_in_no_haste(mode: str) -> None:
    release = render(merged(BASE, {"workers": {"drainSeconds": 90}, "autoscaling": MODES[mode]}))
    spec = release.named(KINDS[mode], "decode")["spec"]
    config = spec if mode == "hpa" else spec["advanced"]["horizontalPodAutoscalerConfig"]
    down = config["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] == 600
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 90}]


def test_triggers_carry_the_authentication() -> None:
    change = {"authentication": "reader", "authModes": "bearer", "prometheus": "https://p:9090"}
    for role in PROMETHEUS_METRICS:
        for trigger in scaled("keda", keda=change).named("ScaledObject", role)["spec"]["triggers"]:
            assert trigger["authenticationRef"] == {"name": "reader"}
            assert trigger["metadata"]["authModes"] == "bearer"
            assert trigger["metadata"]["serverAddress"] == "https://p:9090"


def test_budgets_cover_a_pool_that_may_grow(mode: str) -> None:
    names = {each["metadata"]["name"] for each in scaled(mode).of_kind("PodDisruptionBudget")}
    assert names == {"chat-baton-prefill", "chat-baton-decode"}
    alone = {each["metadata"]["name"] for each in render(BASE).of_kind("PodDisruptionBudget")}
    assert alone == {"chat-baton-prefill"}
