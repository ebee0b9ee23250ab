"""Ports and paths of the chart: those at which processes listen are those that pods open, Services
forward, probes ask and monitors scrape; and pods of a component are spread over nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.deploy.cli.arguments import config_of
from baton.deploy.cli.main import parser
from baton.router.http_frontend.routes import ROUTES
from tests.support.chart import ROOT, Document, Release, Values, example, merged, render
from tests.support.chart_choices import MONITORED

CHOSEN: Values = {  # no port is a default one
    "router": {"port": 8100, "grpcPort": 8200, "replicas": 2},
    "workers": {"port": 9100, "adminPort": 9200},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 2},
    **MONITORED,
    "models": {"second": {"model": {"embedded": True, "name": "second"}}},
}
ROLES: Values = {"autoscaling": {"mode": "baton", "baton": {"ttftSeconds": 2}}}
KUBERAY: Values = {"orchestrator": "kuberay"}
FORMS = {"plain": {}, "roles": ROLES, "kuberay": KUBERAY, "kuberay roles": merged(KUBERAY, ROLES)}
COMPONENT = "app.kubernetes.io/component"
ADMIN = (ROOT / "deploy" / "processes" / "admin.py").read_text()


@pytest.fixture(scope="module", params=FORMS)
def release(request: pytest.FixtureRequest) -> Release:
    return render(merged(example("cpu-demo"), CHOSEN, FORMS[str(request.param)]))


def containers(release: Release, *names: str) -> Iterator[Document]:
    for _, pod in release.pods():
        yield from (each for each in pod["containers"] if not names or each["name"] in names)


def opened(container: Document) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container.get("ports", [])}


def test_routers_listen_where_their_pods_are_open(release: Release) -> None:
    found = list(containers(release, "router"))
    assert len(found) == 2  # one for each model
    for container in found:
        given = [each for each in container["args"] if each.startswith("--set=router.")]
        config = config_of(parser().parse_args(["router", "--model=m", *given])).router
        assert opened(container) == {"http": config.port, "grpc": config.grpc_port}


def test_workers_listen_where_their_pods_are_open(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(containers(release, "worker"))
    assert found
    for container in found:
        given = [each for each in container.get("args", []) if each.startswith("--set=worker.")]
        with monkeypatch.context() as patch:  # KubeRay's pods have the settings there
            for each in container["env"]:
                if each["name"].startswith("BATON_WORKER__"):
                    patch.setenv(each["name"], each["value"].replace("$(POD_IP)", "10.1.2.3"))
            line = [each.replace("$(POD_IP)", "10.1.2.3") for each in given]
            options = parser().parse_args(
                ["worker", "--role=decode", "--worker-id=a", "--model=m", *line]
            )
            config = config_of(options).worker
        ports = opened(container)
        assert (ports["worker"], ports["admin"]) == (config.port, config.admin_port)


def test_probes_ask_paths_that_processes_answer(release: Release) -> None:
    asked = set()
    for container in containers(release):
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            action = container.get(probe, {})
            target = action.get("httpGet") or action.get("tcpSocket")
            if target is None:
                continue
            assert target["port"] in opened(container)
            if path := target.get("path"):
                asked.add((target["port"], path))
                answered = path in ROUTES if target["port"] == "http" else f'"{path}"' in ADMIN
                assert answered, (container["name"], path)
    assert {("http", "/livez"), ("http", "/readyz"), ("admin", "/readyz")} <= asked


def test_monitors_scrape_a_path_that_processes_answer(release: Release) -> None:
    monitors = release.of_kind("PodMonitor")
    assert len(monitors) > 5
    for monitor in monitors:
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["path"] in ROUTES and f'"{endpoint["path"]}"' in ADMIN


def test_services_forward_to_ports_that_are_open(release: Release) -> None:
    checked = 0
    for service in release.of_kind("Service"):
        selector = service["spec"]["selector"]
        pods = [pod for labels, pod in release.pods() if selector.items() <= labels.items()]
        assert pods, service["metadata"]["name"]
        for pod in pods:
            ports = [opened(each) for each in pod["containers"]]
            for port in service["spec"]["ports"]:
                target = port["targetPort"]
                assert any(target in each or target in each.values() for each in ports)
                assert any(each.get(target) == port["port"] for each in ports)
                checked += 1
    assert checked > 5


def test_routes_lead_to_ports_of_services() -> None:
    """No schema of HTTPRoute is here to hold one against: the fields that lead somewhere are."""
    asked = {
        "ingress": {"enabled": True, "host": "a.example.org"},
        "httpRoute": {"enabled": True, "parent": {"name": "gateway"}, "hostname": "a.example.org"},
    }
    release = render(merged(example("cpu-demo"), {"router": CHOSEN["router"]}, asked))
    (service,) = [e for e in release.of_kind("Service") if "router" in e["metadata"]["name"]]
    name, ports = service["metadata"]["name"], service["spec"]["ports"]
    (rule,) = release.named("Ingress", "router")["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend["name"] == name and backend["port"]["name"] in [e["name"] for e in ports]
    route = release.named("HTTPRoute", "router")["spec"]
    assert route["parentRefs"] == [{"name": "gateway"}]
    assert route["hostnames"] == ["a.example.org"]
    (led,) = route["rules"]
    assert led["backendRefs"] == [{"name": name, "port": 8100}]
    assert 8100 in [e["port"] for e in ports]
    prefixes = {led["matches"][0]["path"]["value"], rule["http"]["paths"][0]["path"]}
    assert prefixes == {"/v1"} and any(each.startswith("/v1/") for each in ROUTES)


def test_the_releases_test_asks_ports_of_services(release: Release) -> None:
    offered = {
        f"http://{service['metadata']['name']}.llm:{port['port']}"
        for service in release.of_kind("Service")
        for port in service["spec"]["ports"]
    }
    found = [each for each in containers(release, "check")]
    assert len(found) == 2
    for container in found:
        arguments = [each.partition("=") for each in container["args"]]
        asked = [value for flag, _, value in arguments if flag in ("--url", "--decode")]
        assert len(asked) >= 2 and set(asked) <= offered


@pytest.mark.parametrize("form", FORMS)
def test_pods_of_a_component_are_spread_over_nodes(form: str) -> None:
    values = merged(example("cpu-demo"), CHOSEN, FORMS[form])
    spread = 0
    for labels, pod in render(values).pods():
        if labels.get(COMPONENT) not in ("router", "prefill", "decode", "worker", "controller"):
            continue
        (constraint,) = pod["topologySpreadConstraints"]
        assert constraint["topologyKey"] == "kubernetes.io/hostname"
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"  # one node serves too
        selected = constraint["labelSelector"]["matchLabels"]
        assert selected.items() <= labels.items() and COMPONENT in selected
        spread += 1
    assert spread >= 4
    together = render(merged(values, {"topologySpread": False}))
    assert all("topologySpreadConstraints" not in pod for _, pod in together.pods())
