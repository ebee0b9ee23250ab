"""The release's own Redis speaks TLS alone, as is rendered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.deploy.cli.main import parser
from tests.support.chart import (
    Document,
    Release,
    Values,
    example,
    merged,
    render,
    render_newer,
)

DEMO = example("cpu-demo")
KUBERAY: Values = {"orchestrator": "kuberay"}
HOST, RAYS_HOST = "chat-baton-redis.llm", "chat-baton-ray-redis.llm"
MOUNTED = "/etc/baton/tls"


def container_of(release: Release, server: str) -> Document:
    pod = release.named("StatefulSet", f"baton-{server}")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return dict(container)


def secret_of(pod: Document) -> str:
    (name,) = [each["secret"]["secretName"] for each in pod["volumes"] if each["name"] == "tls"]
    return str(name)


@pytest.mark.parametrize("form", [{}, KUBERAY], ids=["plain", "kuberay"])
def test_processes_call_redis_by_tls_and_the_name_it_bears(form: Values) -> None:
    release = render(merged(DEMO, form))
    called = {
        (variables["BATON_REGISTRY__LOCATION"], variables["BATON_REGISTRY__AUTHORITY"])
        for _, pod in release.pods()
        for container in pod["containers"]
        if "BATON_REGISTRY__LOCATION"
        in (variables := {e["name"]: e.get("value") for e in container.get("env", [])})
    }
    assert called == {(f"rediss://{HOST}:6379/0", f"{MOUNTED}/ca.crt")}
    assert release.named("Service", "baton-redis")["metadata"]["name"] == HOST.split(".")[0]


@pytest.mark.parametrize(
    ("form", "names"), [({}, [HOST]), (KUBERAY, [HOST, RAYS_HOST])], ids=["plain", "kuberay"]
)
def test_the_certificate_bears_the_name_of_each_redis(form: Values, names: list[str]) -> None:
    (job,) = render(merged(DEMO, form)).of_kind("Job")
    (hook,) = job["spec"]["template"]["spec"]["containers"]
    assert parser().parse_args([*hook["command"][1:], *hook["args"]]).redis == names
    managed = render(merged(DEMO, form, {"tls": {"mode": "certManager"}}))
    assert managed.named("Certificate", "baton-redis")["spec"]["dnsNames"] == names
    assert {"server auth", "client auth"} <= {
        *managed.named("Certificate", "baton-redis")["spec"]["usages"]
    }
    for server in (each.split(".")[0].removeprefix("chat-baton-") for each in names):
        pod = managed.named("StatefulSet", f"baton-{server}")["spec"]["template"]["spec"]
        assert secret_of(pod) == managed.named("Certificate", "baton-redis")["spec"]["secretName"]


def test_another_version_of_the_chart_replaces_no_redis(tmp_path: Path) -> None:
    """They keep the registry and Ray's state in memory alone."""
    values = merged(DEMO, KUBERAY)
    now, then = (
        {
            each["metadata"]["name"]: each["spec"]
            for each in release.of_kind("StatefulSet")
            if each["metadata"]["name"].endswith("redis")
        }
        for release in (render(values), render_newer(values, tmp_path))
    )
    assert now == then and len(now) == 2


def test_no_upgrade_replaces_the_pod_of_rays_state() -> None:
    release = render(merged(DEMO, KUBERAY))
    strategies = {
        server: release.named("StatefulSet", f"baton-{server}")["spec"].get("updateStrategy")
        for server in ("redis", "ray-redis")
    }
    assert strategies == {"redis": None, "ray-redis": {"type": "OnDelete"}}


def test_a_redis_of_your_own_gets_no_certificate() -> None:
    own = {"redis": {"enabled": False, "url": "rediss://r"}, "secrets": {"existing": "mine"}}
    release = render(merged(DEMO, own, {"tls": {"mode": "certManager"}}))
    assert HOST not in json.dumps(release.documents)
    names = [each["metadata"]["name"] for each in release.of_kind("Certificate")]
    assert "chat-baton-router" in names and "chat-baton-redis" not in names
    (hook,) = render(merged(DEMO, own)).of_kind("Job")
    assert "--redis" not in json.dumps(hook)


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("rediss://r", 6379),
        ("rediss://r:6390/3", 6390),
        ("rediss://[fd00::6:1]", 6379),
        ("rediss://[fd00::6:1]:6390/0", 6390),
    ],
)
def test_policies_open_the_port_of_your_own_redis(url: str, port: int) -> None:
    own = {"redis": {"enabled": False, "url": url}, "secrets": {"existing": "mine"}}
    policy = render(merged(DEMO, own)).named("NetworkPolicy", "baton-router")
    rules = policy["spec"]["egress"]
    anywhere = {port["port"] for rule in rules if "to" not in rule for port in rule["ports"]}
    assert anywhere - {53} == {port}


def test_a_given_secret_is_mounted() -> None:
    given = {name: name[0] for name in ("router", "prefill", "decode", "redis")} | {"ray": "y"}
    asked = {"tls": {"mode": "existing", "existingSecrets": given}}
    release = render(merged(DEMO, KUBERAY, asked))
    for server in ("redis", "ray-redis"):
        pod = release.named("StatefulSet", f"baton-{server}")["spec"]["template"]["spec"]
        assert secret_of(pod) == "r"
        assert {"name": "tls", "mountPath": MOUNTED, "readOnly": True} in pod["containers"][0][
            "volumeMounts"
        ]


def test_rays_head_calls_its_redis_by_tls() -> None:
    (cluster,) = render(merged(DEMO, KUBERAY)).of_kind("RayCluster")
    assert cluster["spec"]["gcsFaultToleranceOptions"]["redisAddress"] == (
        f"rediss://{RAYS_HOST}:6379"
    )
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    head = pod["containers"][0]
    given = {each["name"]: each["value"] for each in head["env"]}
    assert {name: value for name, value in given.items() if "RAY_TLS" not in name} == {
        "HOME": "/tmp",
        "RAY_USE_TLS": "1",
        "RAY_REDIS_CA_CERT": f"{MOUNTED}/ca.crt",
        "RAY_REDIS_CLIENT_CERT": f"{MOUNTED}/tls.crt",
        "RAY_REDIS_CLIENT_KEY": f"{MOUNTED}/tls.key",
    }
    assert MOUNTED in {each["mountPath"] for each in head["volumeMounts"]}
    assert secret_of(pod) == "chat-baton-router-tls"


def mounted_tls(pod: Document) -> set[str]:
    """Return the containers of a pod that have its certificate."""
    return {
        each["name"]
        for each in pod["containers"]
        if {"name": "tls", "mountPath": MOUNTED, "readOnly": True} in each["volumeMounts"]
    }


def test_certificates_reach_head_drivers_and_workers() -> None:
    """Ray gives its processes the environment of their container (docs/kubernetes.md)."""
    models = {"models": {"code": {"model": {"embedded": True}}}}
    (cluster,) = render(merged(DEMO, KUBERAY, models)).of_kind("RayCluster")
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert secret_of(head) == "chat-baton-router-tls"
    assert mounted_tls(head) == {"ray-head", "fleet", "fleet-code"}
    groups = cluster["spec"]["workerGroupSpecs"]
    assert [(each["groupName"], secret_of(each["template"]["spec"])) for each in groups] == [
        ("prefill", "chat-baton-prefill-tls"),
        ("decode", "chat-baton-decode-tls"),
        ("code-prefill", "chat-baton-prefill-tls"),
        ("code-decode", "chat-baton-decode-tls"),
    ]
    named = {
        "BATON_REGISTRY__AUTHORITY": f"{MOUNTED}/ca.crt",
        "BATON_SECURITY__AUTHORITY": f"{MOUNTED}/ca.crt",
        "BATON_SECURITY__CERTIFICATE": f"{MOUNTED}/tls.crt",
        "BATON_SECURITY__KEY": f"{MOUNTED}/tls.key",
    }
    drivers = head["containers"][1:]
    workers = [each["template"]["spec"]["containers"][0] for each in groups]
    for pod in (each["template"]["spec"] for each in groups):
        assert mounted_tls(pod) == {"worker"}
    for container in (*drivers, *workers):
        given = {each["name"]: each.get("value") for each in container["env"]}
        assert given.items() >= named.items(), container["name"]


def test_redis_speaks_plain_text_only_with_tls_off() -> None:
    off = render(merged(DEMO, KUBERAY, {"tls": {"mode": "off"}}))
    text = json.dumps(off.documents)
    assert f"redis://{HOST}:6379/0" in text and f"redis://{RAYS_HOST}:6379" in text
    assert "rediss://" not in text and MOUNTED not in text
    for server in ("redis", "ray-redis"):
        assert "port 6379" in container_of(off, server)["args"][0]
        on = container_of(render(merged(DEMO, KUBERAY)), server)["args"][0]
        assert "port 0" in on and "tls-port 6379" in on and "tls-auth-clients yes" in on


def test_policies_of_redis_are_those_of_plain_text() -> None:
    found = [
        [each for each in render(merged(DEMO, KUBERAY, asked)).of_kind("NetworkPolicy")]
        for asked in ({}, {"tls": {"mode": "off"}})
    ]
    assert found[0] == found[1]
