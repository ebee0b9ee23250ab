"""Values of the chart for tests of all releases: its examples, each choice alone, and combinations
drawn at random."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from tests.support.chart import KUBERAY, PLAIN, Values, example, merged

EXAMPLES = ("cpu-demo", "single-node-8gpu", "production")
COMBINATIONS = 240
CERTIFIED = ("router", "prefill", "decode", "redis", "ray")
SECURED = {
    "prometheus": "https://prometheus:9090",
    "authentication": "reader",
    "authModes": "bearer,tls",
}
MONITORED: Values = {  # metrics, and a peer that may read them
    "monitoring": {"enabled": True},
    "networkPolicy": {"monitoring": [{"namespaceSelector": {}}]},
}
HEADS = {"kvHeads": 8, "heads": 32}  # a `tp` of 2 fits
CHOICES: dict[str, list[Any]] = {
    "model": [
        {"embedded": True},
        {"path": "a/b", "volume": {"existingClaim": "weights"}, **HEADS},
        {"path": "b", "volume": {"hostPath": "/srv/models"}, "name": "chat", **HEADS},
        {"repository": "owner/name", "revision": "0a1b2c", "tokenSecret": "hub", **HEADS},
    ],
    "tls": [
        {"mode": "hook"},
        {"mode": "off"},
        {"mode": "certManager"},
        {"mode": "certManager", "issuer": {"name": "corporate", "kind": "ClusterIssuer"}},
        {"mode": "existing", "existingSecrets": dict.fromkeys(CERTIFIED, "mine")},
    ],
    "redis": [
        {"enabled": True},
        {"enabled": True, "memory": "1Gi"},
        {"enabled": False, "url": "rediss://redis.example.org:6380/3"},
        {"enabled": False, "url": "redis://redis", "plainText": True},
    ],
    "secrets": [{}, {"existing": "mine"}],
    "networkPolicy": [
        {},
        {"enabled": False},
        {"clients": [{"namespaceSelector": {}}], "monitoring": [{"podSelector": {}}]},
    ],
    "monitoring": [
        {},
        {"enabled": True, "labels": {"release": "prometheus"}, "otlpEndpoint": "https://otel:4317"},
        {"enabled": True, "monitors": "services"},
    ],
    "ingress": [
        {},
        {"enabled": True, "host": "a.example.org", "className": "nginx", "tlsSecret": "tls"},
    ],
    "httpRoute": [{}, {"enabled": True, "parent": {"name": "gateway"}}],
    "prefill": [
        {},
        {"replicas": 3, "gpu": {"count": 2}, "rdma": {"resource": "rdma/hca", "count": 1}},
        {"gpu": {"count": 0}, "tp": 2, "settings": {"step.prefill_tokens": 1024}},
    ],
    "decode": [{}, {"replicas": 5, "nodeSelector": {"gpu": "h200"}}],
    "router": [
        {},
        {"replicas": 1},
        {"service": {"type": "LoadBalancer"}, "drainSeconds": 5},
        {"tlsSecret": "web"},
    ],
    "workers": [
        {},
        {"kvPorts": "30000-30010", "kvDevices": "eth1", "settings": {"pool.blocks": 9}},
        {"topologyLabels": ["topology.kubernetes.io/zone", "rack"]},
    ],
    "autoscaling": [
        {},
        {"mode": "hpa", "prefill": {"queuedTokens": 9000}, "scaleDownSeconds": 0},
        {"mode": "keda", "keda": {"prometheus": "http://prometheus:9090"}},
        {"mode": "keda", "keda": {**SECURED, "pollingSeconds": 30}},
        {"mode": "baton", "baton": {"ttftSeconds": 2}},
        {"mode": "baton", "baton": {"itlSeconds": 0.1, "maxWorkers": 8}},
    ],
    "orchestrator": ["plain", "kuberay"],
    "models": [
        {},
        {
            "code": {"model": {"repository": "owner/code", **HEADS}},
            "a": {"model": {"embedded": True}},
        },
    ],
    "topologySpread": [True, False],
    "tests": [{}, {"enabled": False}],
}


def each_choice() -> Iterator[Values]:
    """The examples, each choice beside the defaults with either orchestrator, and a controller of
    pods of KubeRay."""
    yield from map(example, EXAMPLES)
    sized = {key: CHOICES[key][-1] for key in ("autoscaling", "models")}
    yield fitting(KUBERAY | sized)
    for base, (key, values) in itertools.product((PLAIN, KUBERAY), CHOICES.items()):
        for value in values:
            yield fitting(base | {key: value})


def drawn_choices() -> Iterator[Values]:
    drawn = random.Random(1)
    for _ in range(COMBINATIONS):
        yield fitting({key: drawn.choice(values) for key, values in CHOICES.items()})


def fitting(values: Values) -> Values:
    """Return the values with the metrics that an autoscaler reads and a peer that may read them,
    the password of an own Redis, and no certificate for a Redis or a Ray that the release does not
    run."""
    if values.get("autoscaling", {}).get("mode") in ("hpa", "keda"):
        values = merged(values, {"monitoring": {"enabled": True}, "orchestrator": "plain"})
    if values.get("monitoring", {}).get("enabled") and not values.get("networkPolicy"):
        values = merged(values, MONITORED)
    kuberay = values.get("orchestrator") != "plain"
    if not kuberay and values.get("tls", {}).get("mode") == "existing":
        values = merged(values, {"tls": {"existingSecrets": {"ray": ""}}})
    if values.get("redis", {}).get("url"):
        values = merged(values, {"secrets": {"existing": "mine"}})
        if not kuberay and values.get("tls", {}).get("mode") == "existing":
            values = merged(values, {"tls": {"existingSecrets": {"redis": ""}}})
    if values.get("autoscaling", {}).get("mode") == "baton":  # its workers are alike
        alike = {**values.get("prefill", {}), "replicas": 3}
        return {**values, "prefill": alike, "decode": alike}
    return values
