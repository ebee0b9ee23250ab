"""The rules and dashboards of a rendered release."""

from __future__ import annotations

import json

from tests.support.chart import (
    FOLDER,
    merged,
    render,
)


def test_rules_select_the_release_and_carry_its_name() -> None:
    release = render({"model": {"embedded": True}, "monitoring": {"enabled": True}})
    (rule,) = release.of_kind("PrometheusRule")
    rules = [each for group in rule["spec"]["groups"] for each in group["rules"]]
    own = 'namespace="llm",pod=~"chat-baton-.*"'
    assert len(rules) > 20
    for each in rules:
        if "process_" not in each["expr"] and "baton_" in each["expr"]:
            assert own in each["expr"], each
        if "record" in each:
            assert each["labels"] == {"app_kubernetes_io_instance": "chat"}
    assert len({group["name"] for group in rule["spec"]["groups"]}) == 2
    assert "SELECT_RELEASE" not in str(rule) and "RELEASE_NAME" not in str(rule)


def test_dashboards_are_whole_and_can_be_left_out() -> None:
    on = {"model": {"embedded": True}, "monitoring": {"enabled": True}}
    made = render(on).of_kind("ConfigMap")
    boards = [each for each in made if "grafana_dashboard" in each["metadata"]["labels"]]
    files = {path.name: path.read_text() for path in (FOLDER / "dashboards").glob("*.json")}
    found = {name: text for each in boards for name, text in each["data"].items()}
    assert len(boards) == 5
    assert {name: json.loads(text) for name, text in found.items()} == {
        name: json.loads(text) for name, text in files.items()
    }
    off = merged(on, {"monitoring": {"dashboards": False}})
    kept = render(off).of_kind("ConfigMap")
    assert not [each for each in kept if "grafana_dashboard" in each["metadata"]["labels"]]
    other = merged(on, {"monitoring": {"dashboardLabels": {"board": "yes"}}})
    labels = [each["metadata"]["labels"] for each in render(other).of_kind("ConfigMap")]
    assert sum(each.get("board") == "yes" for each in labels) == 5
