"""The rules and dashboards of a rendered release."""

from __future__ import annotations

import json

import pytest

from baton.deploy.monitoring import generate
from tests.support import chart_choices as choices
from tests.support.chart import FOLDER, PLAIN, Document, Release, Values, merged, render

MONITORED: Values = merged(PLAIN, choices.MONITORED)


def rules_of(release: Release) -> list[Document]:
    """Return all rules of a release."""
    (found,) = release.of_kind("PrometheusRule")
    return [each for group in found["spec"]["groups"] for each in group["rules"]]


def test_rules_select_the_release_and_carry_its_name() -> None:
    release = render(MONITORED)
    (rule,) = release.of_kind("PrometheusRule")
    rules = rules_of(release)
    own = 'namespace="llm",app_kubernetes_io_instance="chat"'
    assert len(rules) > 20
    for each in rules:
        if "process_" not in each["expr"] and "baton_" in each["expr"]:
            assert own in each["expr"], each
        severity = {} if "record" in each else {"severity": each["labels"]["severity"]}
        assert each["labels"] == severity | {
            "app_kubernetes_io_instance": "chat",
            "namespace": "llm",
        }
    assert len({group["name"] for group in rule["spec"]["groups"]}) == 2
    for left in (generate.CHART_SELECT, *generate.CHART_LABELS.values()):
        assert left not in str(rule)


@pytest.mark.parametrize("monitors", ["pods", "services"])
def test_series_of_all_pods_bear_the_label_of_their_release(monitors: str) -> None:
    """Its name, which begins those of pods, may begin another release's name, and is cut in those
    of a further model's pods."""
    label = "app.kubernetes.io/instance"
    names = {"m" * 16: {"model": {"embedded": True}}}
    values = merged(MONITORED, {"monitoring": {"monitors": monitors}, "models": names})
    for form in ({}, {"orchestrator": "kuberay"}):
        release = render(merged(values, form), name="baton-of-the-whole-company-in-production")
        found = release.of_kind("PodMonitor", "ServiceMonitor")
        assert len(found) >= 6 and all(label in e["spec"]["podTargetLabels"] for e in found)
        assert {labels[label] for labels, _ in release.pods()} == {
            "baton-of-the-whole-company-in-production"
        }
    (selected, *_) = [each["expr"] for each in rules_of(release)]
    assert 'app_kubernetes_io_instance="baton-of-the-whole-company-in-production"' in selected


def test_alerts_and_series_of_two_releases_differ() -> None:
    """Equal labels are one alert to Alertmanager: its end at one release would end the other's."""
    made = [render(MONITORED, "chat"), render(MONITORED, "code"), render(MONITORED, "chat", "b")]
    found = [
        json.dumps([each.get("alert") or each["record"], each["labels"]], sort_keys=True)
        for release in made
        for each in rules_of(release)
    ]
    assert len(set(found)) == len(found) > 60


def test_dashboards_are_whole_and_can_be_left_out() -> None:
    made = render(MONITORED).of_kind("ConfigMap")
    boards = [each for each in made if "grafana_dashboard" in each["metadata"]["labels"]]
    files = {path.name: path.read_text() for path in (FOLDER / "dashboards").glob("*.json")}
    found = {name: text for each in boards for name, text in each["data"].items()}
    assert len(boards) == 5
    assert {name: json.loads(text) for name, text in found.items()} == {
        name: json.loads(text) for name, text in files.items()
    }
    off = merged(MONITORED, {"monitoring": {"dashboards": False}})
    kept = render(off).of_kind("ConfigMap")
    assert not [each for each in kept if "grafana_dashboard" in each["metadata"]["labels"]]
    other = merged(MONITORED, {"monitoring": {"dashboardLabels": {"board": "yes"}}})
    labels = [each["metadata"]["labels"] for each in render(other).of_kind("ConfigMap")]
    assert sum(each.get("board") == "yes" for each in labels) == 5
