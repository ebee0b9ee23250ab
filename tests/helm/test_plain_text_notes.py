"""The notes of a release name what travels in plain text."""

from __future__ import annotations

import pytest

from tests.support.chart import Values, example, merged, render

DEMO = example("cpu-demo")
INGRESS = {"enabled": True, "host": "a.example.org"}
ROUTE = {"enabled": True, "parent": {"name": "gateway"}}
TLS = {"router": {"tlsSecret": "web"}}
RAYS_HTTP = "the HTTP of its agents is plain and stays in each pod"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "Clients talk to the routers in plain HTTP and gRPC. Probes, metrics and other reads"),
        ({"ingress": INGRESS}, "gRPC, through the Ingress too: ingress.tlsSecret is empty."),
        ({"ingress": {**INGRESS, "tlsSecret": "x"}}, "gRPC; the Ingress ends their TLS."),
        (TLS, "Clients talk to the routers by TLS. Probes, metrics and other reads"),
        ({**TLS, "ingress": INGRESS}, "TLS, but to the Ingress in plain HTTP: ingress.tlsSecret i"),
        (
            {**TLS, "ingress": {**INGRESS, "tlsSecret": "x"}},
            "by TLS. The Ingress has to call the routers by HTTPS, as its controller's annotation",
        ),
        (
            {**TLS, "httpRoute": ROUTE},
            "by TLS. The Gateway has to call the routers by HTTPS, so Service chat-baton-router "
            "needs a BackendTLSPolicy, which the chart does not create. Probes",
        ),
        ({"orchestrator": "kuberay"}, f"Ray's gRPC uses TLS; {RAYS_HTTP}.\nKV blocks travel"),
        (
            {"orchestrator": "kuberay", "tls": {"mode": "off"}},
            f"Ray's processes talk in plain text, its token included; {RAYS_HTTP}.",
        ),
        (
            {"orchestrator": "kuberay", "networkPolicy": {"enabled": False}},
            f"{RAYS_HTTP}, but no policy of this release closes it to other pods.",
        ),
        ({"monitoring": {"otlpEndpoint": "otel:4317"}}, "Spans go to otel:4317 in plain text;"),
    ],
)
def test_the_notes_name_what_is_plain_text(values: Values, words: str) -> None:
    assert words in render(merged(DEMO, values)).notes


def test_spans_by_https_are_not_called_plain() -> None:
    endpoint = "https://otel:4317"
    assert "Spans" not in render(merged(DEMO, {"monitoring": {"otlpEndpoint": endpoint}})).notes
