"""A release whose clients talk to its routers by TLS (`router.tlsSecret`), as is rendered."""

from __future__ import annotations

import json
import re

import pytest

from baton.deploy.cli.main import parser
from tests.support.chart import Document, Release, Values, example, merged, render
from tests.support.chart_choices import MONITORED

DEMO = example("cpu-demo")
TLS: Values = {"router": {"tlsSecret": "web"}}
FOLDER = "/etc/baton/client-tls"
CODE: Values = {"models": {"code": {"model": {"embedded": True}}}}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def pod_of(release: Release, router: str = "baton-router") -> Document:
    return dict(release.named("Deployment", router)["spec"]["template"]["spec"])


def mounted(pod: Document) -> list[Document]:
    """Return the volumes that the only container of a pod has at FOLDER, read-only."""
    (container,) = pod["containers"]
    names = [
        each["name"]
        for each in container["volumeMounts"]
        if each == {"name": each["name"], "mountPath": FOLDER, "readOnly": True}
    ]
    return [each["secret"] for each in pod["volumes"] if each["name"] in names]


def schemes(pod: Document) -> set[str]:
    (container,) = pod["containers"]
    return {container[each]["httpGet"]["scheme"] for each in PROBES}


def test_routers_serve_with_the_secret_as_a_whole() -> None:
    """A kubelet renews files of a volume, and none of a subPath."""
    pod = pod_of(render(merged(DEMO, TLS)))
    assert mounted(pod) == [{"secretName": "web", "defaultMode": 0o440}]
    assert f"--set=router.tls={FOLDER}" in pod["containers"][0]["args"]
    assert schemes(pod) == {"HTTPS"}


def test_without_a_secret_routers_serve_plain_text() -> None:
    release = render(merged(DEMO, MONITORED))
    pod = pod_of(release)
    assert schemes(pod) == {"HTTP"}
    text = json.dumps(release.documents)
    assert FOLDER not in text and "router.tls=" not in text and "appProtocol" not in text
    assert '"scheme": "https"' not in text


def test_only_routers_have_the_key() -> None:
    for form in ("plain", "kuberay"):
        release = render(merged(DEMO, TLS, {"orchestrator": form}))
        for labels, pod in release.pods():
            used = [each["secret"] for each in pod["volumes"] if "secret" in each]
            found = [each for each in used if each["secretName"] == "web"]
            component = labels.get("app.kubernetes.io/component", "")
            assert len(found) == (component in ("router", "test")), component
            if component == "test":
                assert found[0]["items"] == [{"key": "tls.crt", "path": "tls.crt"}]


def test_the_service_says_that_its_ports_speak_tls() -> None:
    ports = render(merged(DEMO, TLS)).named("Service", "baton-router")["spec"]["ports"]
    assert {each["name"]: each["appProtocol"] for each in ports} == {
        "http": "https",
        "grpc": "https",
    }


@pytest.mark.parametrize(
    ("monitors", "kind", "field"),
    [
        ("pods", "PodMonitor", "podMetricsEndpoints"),
        ("services", "ServiceMonitor", "endpoints"),
    ],
)
def test_metrics_of_routers_alone_are_read_by_https(monitors: str, kind: str, field: str) -> None:
    release = render(merged(DEMO, MONITORED, TLS, {"monitoring": {"monitors": monitors}}))
    found = {
        each["metadata"]["name"]: each["spec"][field][0].get("scheme", "http")
        for each in release.of_kind(kind)
    }
    assert found == {
        "chat-baton-router": "https",
        "chat-baton-prefill": "http",
        "chat-baton-decode": "http",
    }
    (endpoint,) = release.named(kind, "baton-router")["spec"][field]
    assert endpoint["tlsConfig"] == {"insecureSkipVerify": True}


def test_the_releases_test_asks_for_that_certificate() -> None:
    pod = render(merged(DEMO, TLS)).named("Pod", "test")["spec"]
    assert len(mounted(pod)) == 1
    (container,) = pod["containers"]
    asked = parser().parse_args([*container["command"][1:], *container["args"]])
    assert str(asked.certificate) == f"{FOLDER}/tls.crt"
    assert asked.url == "https://chat-baton-router.llm:8000"
    plain = render(DEMO).named("Pod", "test")["spec"]["containers"][0]
    asked = parser().parse_args([*plain["command"][1:], *plain["args"]])
    assert (asked.certificate, asked.url) == (None, "http://chat-baton-router.llm:8000")


@pytest.mark.parametrize(
    ("own", "secret"), [({}, "web"), ({"tlsSecret": "other"}, "other"), ({"tlsSecret": ""}, None)]
)
def test_a_further_model_may_have_another_secret(own: Values, secret: str | None) -> None:
    release = render(merged(DEMO, TLS, CODE, {"models": {"code": {"router": own}}}))
    pod = pod_of(release, "baton-code-router")
    assert [each["secretName"] for each in mounted(pod)] == [secret] * bool(secret)
    assert schemes(pod) == {"HTTPS" if secret else "HTTP"}
    said = "service/chat-baton-code-router, in plain text.\n" in release.notes
    assert said == (secret is None)


def test_the_notes_name_a_further_model_that_alone_has_tls() -> None:
    alone = merged(DEMO, CODE, {"models": {"code": TLS}})
    assert "service/chat-baton-code-router, by TLS.\n" in render(alone).notes


def test_the_notes_ask_by_https_and_trust_the_certificate() -> None:
    notes = render(merged(DEMO, TLS)).notes
    (read,) = re.findall(r"^  kubectl .* \| base64 -d > (\S+)$", notes, re.MULTILINE)
    host = "chat-baton-router.llm"
    assert f"curl -N --cacert {read} --resolve {host}:8000:127.0.0.1 \\\n" in notes
    assert f"https://{host}:8000/v1/chat/completions" in notes and "http://127" not in notes
    assert f"If the certificate does not bear {host}, write a name that it bears" in notes
