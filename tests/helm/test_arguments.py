"""Arguments of containers: a value gets to its process as it was given."""

from __future__ import annotations

import pytest

from tests.support.chart import Document, Values, example, merged, render

ODD = "a b #1: c"
TRACED = {"telemetry.log_folder": ODD}
FORMS: dict[str, Values] = {
    "plain": {},
    "one group": {"autoscaling": {"mode": "baton", "baton": {"ttftSeconds": 2}}},
    "kuberay": {"orchestrator": "kuberay"},
}


def given(container: Document) -> list[str]:
    environment = [f"{e['name']}={e.get('value')}" for e in container.get("env", ())]
    return [*container.get("args", ()), *environment]


@pytest.mark.parametrize("form", FORMS)
def test_values_with_spaces_and_marks_are_passed_whole(form: str) -> None:
    model = {"embedded": False, "path": ODD, "name": ODD, "volume": {"hostPath": f"/{ODD}"}}
    odd = {"model": model, "router": {"settings": TRACED}, "workers": {"settings": TRACED}}
    release = render(merged(example("cpu-demo"), FORMS[form], odd))
    found = {
        labels["app.kubernetes.io/component"]: (spec, given(container))
        for labels, spec in release.pods()
        for container in spec["containers"]
        if labels["app.kubernetes.io/name"] == "baton"
    }
    (router, words), (_, asked) = found["router"], found["test"]
    assert {f"--model=/models/{ODD}", f"--model-name={ODD}"} <= set(words)
    assert f"--set=telemetry.log_folder={ODD}" in words and f"--model={ODD}" in asked
    (path,) = [each["hostPath"]["path"] for each in router["volumes"] if "hostPath" in each]
    assert path == f"/{ODD}"
    if form == "kuberay":
        (_, driver), (_, worker) = found["ray-head"], found["decode"]
        assert driver[0] == f"/models/{ODD}" and f"BATON_TELEMETRY__LOG_FOLDER={ODD}" in worker
    else:
        _, worker = found["worker" if form == "one group" else "decode"]
        assert {f"--model=/models/{ODD}", f"--set=telemetry.log_folder={ODD}"} <= set(worker)


def test_a_route_takes_a_wildcard_as_its_host_name() -> None:
    route = {"enabled": True, "parent": {"name": "public"}, "hostname": "*.example.org"}
    (made,) = render(merged(example("cpu-demo"), {"httpRoute": route})).of_kind("HTTPRoute")
    assert made["spec"]["hostnames"] == ["*.example.org"]
