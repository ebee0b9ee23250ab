"""`helm install` with the default orchestrator, in clusters with and without a KubeRay operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import Values, example, merged, render
from tests.support.live_chart import try_install
from tests.support.pods import secrets_server
from tests.support.pods.secrets_server import SecretsServer

KUBERAY = merged(example("cpu-demo"), {"orchestrator": "kuberay"})
DEFAULT: Values = {"model": {"embedded": True}}
NO_SCHEMA = "failed to download openapi"  # of the server: the templates are rendered by then
EACH_SERVER_HAS = "apiregistration.k8s.io"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecretsServer]:
    made = SecretsServer("127.0.0.1", "llm", tmp_path / "api")
    yield made
    made.close()


def serve_apis(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the server answer what Helm asks to know its APIs."""
    groups = []
    for name in names:
        version = {"groupVersion": f"{name}/v1", "version": "v1"}
        groups.append({"name": name, "versions": [version], "preferredVersion": version})
    answers: dict[str, dict[str, Any]] = {
        "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for name in names:
        listed = {"kind": "APIResourceList", "groupVersion": f"{name}/v1", "resources": []}
        answers.setdefault(f"/apis/{name}/v1", listed)
    for path, answer in answers.items():
        if path not in secrets_server.DISCOVERED:
            monkeypatch.setitem(secrets_server.DISCOVERED, path, answer)


@pytest.mark.parametrize("values", [KUBERAY, DEFAULT], ids=["kuberay", "default"])
def test_an_install_without_kuberay_says_what_is_missing(
    server: SecretsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: Values
) -> None:
    serve_apis(monkeypatch, EACH_SERVER_HAS)
    said = try_install(server, values, tmp_path)
    assert "orchestrator is kuberay (the default), but this cluster has no RayCluster" in said
    assert "install the KubeRay operator, 1.6 or newer, or run the workers without Ray: " in said
    assert "--set orchestrator=plain" in said


@pytest.mark.parametrize(
    ("values", "apis"),
    [(KUBERAY, (EACH_SERVER_HAS, "ray.io")), (example("cpu-demo"), (EACH_SERVER_HAS,))],
)
def test_an_install_that_lacks_nothing_is_rendered(
    server: SecretsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: Values,
    apis: tuple[str, ...],
) -> None:
    serve_apis(monkeypatch, *apis)
    assert NO_SCHEMA in try_install(server, values, tmp_path)


def test_helm_template_asks_no_cluster() -> None:
    assert render(DEFAULT).of_kind("RayCluster")
