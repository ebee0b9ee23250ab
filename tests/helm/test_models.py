"""Further models of a release: routers and workers of their own, Secrets and Redis in common."""

from __future__ import annotations

import helm_python
import pytest

from baton.runtime.cluster_config import RegistryConfig
from baton.runtime.shared_registry.registry_location import key_prefix
from tests.support.chart import Document, Release, Values, example, merged, render
from tests.support.chart_choices import MONITORED
from tests.support.json_values import Json, JsonObject

DEMO = example("cpu-demo")
BIG = {
    "model": {"repository": "owner/name", "revision": "0a1b2c"},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 3, "gpu": {"count": 1}, "settings": {"worker.device": "cuda"}},
    "router": {"replicas": 2},
}
BASE = merged(DEMO, {"models": {"big": BIG, "tiny": {"model": {"embedded": True, "name": "b"}}}})
NAME = "app.kubernetes.io/name"
COMPONENT = "app.kubernetes.io/component"


@pytest.fixture(scope="module")
def release() -> Release:
    return render(merged(BASE, MONITORED))


def container_of(document: Document) -> Document:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return dict(container)


def environment_of(document: Document) -> JsonObject:
    return {each["name"]: each.get("value") or each["valueFrom"] for each in
            container_of(document)["env"]}  # fmt: skip


def owned(release: Release, kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in release.of_kind(kind)}


def test_a_release_without_further_models_is_as_it_was() -> None:
    assert render(merged(DEMO, {"models": {}})).documents == render(DEMO).documents


def test_each_model_has_routers_and_workers_of_its_own(release: Release) -> None:
    assert owned(release, "Deployment") == {
        "chat-baton-router", "chat-baton-big-router", "chat-baton-tiny-router",
    }  # fmt: skip
    pools = owned(release, "StatefulSet") - {"chat-baton-redis"}
    assert pools == {
        f"chat-baton{model}-{role}"
        for model in ("", "-big", "-tiny")
        for role in ("prefill", "decode")
    }
    decode = release.named("StatefulSet", "big-decode")
    assert decode["spec"]["replicas"] == 3
    assert container_of(decode)["resources"]["limits"]["nvidia.com/gpu"] == 1
    arguments = container_of(decode)["args"]
    assert "--model=/models/owner--name@0a1b2c" in arguments
    assert {"--set=worker.device=cuda", "--set=pool.blocks=2048"} <= set(arguments)
    router = container_of(release.named("Deployment", "tiny-router"))
    assert "--model-name=b" in router["args"]


def test_models_share_secrets_and_redis_but_no_cluster(release: Release) -> None:
    assert {name for name in owned(release, "StatefulSet") if "redis" in name} == {
        "chat-baton-redis"
    }
    assert len(release.of_kind("PrometheusRule")) == 1
    shared = ("BATON_TOKEN", "BATON_REGISTRY__LOCATION", "BATON_SECURITY__SERVER_NAME")
    found = [environment_of(each) for each in release.of_kind("Deployment")]
    for name in shared:
        assert all(each[name] == found[0][name] for each in found)
    clusters = {each["BATON_REGISTRY__CLUSTER"] for each in found}
    assert clusters == {"llm_chat-baton", "llm_chat-baton-big", "llm_chat-baton-tiny"}
    certificates = {
        volume["secret"]["secretName"]
        for _, pod in release.pods()
        for volume in pod["volumes"]
        if volume["name"] == "tls"
    }
    roles = ("router", "prefill", "decode", "redis")
    assert certificates == {f"chat-baton-{each}-tls" for each in roles}


def selected(selector: Document, release: Release) -> set[tuple[str, str]]:
    """Return model and component of the pods that a selector finds."""
    wanted = selector.get("matchLabels", selector).items()
    return {
        (labels[NAME], labels.get(COMPONENT, ""))
        for labels, _ in release.pods()
        if wanted <= labels.items()
    }


def test_selectors_find_pods_of_one_model(release: Release) -> None:
    kinds = ("Service", "PodMonitor", "PodDisruptionBudget", "Deployment", "StatefulSet")
    for document in release.of_kind(*kinds):
        found = selected(document["spec"]["selector"], release)
        labels = document["metadata"]["labels"]
        assert found == {(labels[NAME], labels[COMPONENT])}, document["metadata"]["name"]


def admitted(policy: Document) -> set[tuple[str, str]]:
    """Return model and component of the peers of a policy's rules for incoming calls."""
    return {
        (peer["podSelector"]["matchLabels"][NAME], component)
        for rule in policy["spec"]["ingress"]
        for peer in rule.get("from", [])
        if "podSelector" in peer
        for component in peer["podSelector"]["matchExpressions"][0]["values"]
    }


def test_policies_keep_models_apart_and_let_all_reach_redis(release: Release) -> None:
    callers = admitted(release.named("NetworkPolicy", "big-decode"))
    assert {name for name, _ in callers} == {"baton-model-big"}
    names = {name for name, _ in admitted(release.named("NetworkPolicy", "redis"))}
    assert names == {"baton", "baton-model-big", "baton-model-tiny"}
    for ending in ("router", "big-router"):
        egress = release.named("NetworkPolicy", f"baton-{ending}")["spec"]["egress"]
        redis = [rule for rule in egress if rule["ports"][0].get("port") == 6379]
        assert redis[0]["to"][0]["podSelector"]["matchLabels"][NAME] == "baton"
    denied = [each for each in release.of_kind("NetworkPolicy")
              if each["metadata"]["name"].endswith("default-deny")]  # fmt: skip
    assert len(denied) == 3


def test_each_model_is_downloaded_and_tested_by_itself(release: Release) -> None:
    assert owned(release, "PersistentVolumeClaim") == {"chat-baton-big-models"}
    downloads = [name for name in owned(release, "Job") if "-model-" in name]
    assert len(downloads) == 1 and downloads[0].startswith("chat-baton-big-model-")
    assert owned(release, "Pod") == {f"chat-baton{each}-test" for each in ("", "-big", "-tiny")}
    assert "service/chat-baton-big-router" in release.notes


def test_a_model_has_no_volume_and_no_route_of_the_release() -> None:
    routed = {
        "model": {"embedded": False, "path": "b", "volume": {"hostPath": "/srv"}},
        "ingress": {"enabled": True, "host": "x.example.org", "className": "nginx"},
        "httpRoute": {"enabled": True, "parent": {"name": "gateway"}, "hostname": "y.example.org"},
        "models": {"code": {"model": {"repository": "owner/code"}}},
    }
    release = render(merged(DEMO, routed))
    assert owned(release, "Ingress") == owned(release, "HTTPRoute") == {"chat-baton-router"}
    assert owned(release, "PersistentVolumeClaim") == {"chat-baton-code-models"}
    own = {"models": {"code": {"ingress": {"enabled": True, "host": "code.example.org"}}}}
    found = {
        each["metadata"]["name"]: each["spec"]
        for each in render(merged(DEMO, routed, own)).of_kind("Ingress")
    }
    assert set(found) == {"chat-baton-router", "chat-baton-code-router"}
    spec = found["chat-baton-code-router"]
    assert spec["ingressClassName"] == "nginx"
    (rule,) = spec["rules"]
    assert rule["host"] == "code.example.org"
    service = rule["http"]["paths"][0]["backend"]["service"]
    assert service["name"] == "chat-baton-code-router"


def test_a_model_changes_one_limit_and_keeps_the_rest() -> None:
    own = {"model": {"embedded": True}, "decode": {"resources": {"limits": {"memory": "6Gi"}}}}
    large = {"workers": {"settings": {"pool.blocks": 1048576}}}
    release = render(merged(DEMO, large, {"models": {"a": own}}))
    container = container_of(release.named("StatefulSet", "a-decode"))
    resources = container_of(release.named("StatefulSet", "baton-decode"))["resources"]
    assert container["resources"] == {**resources, "limits": {"memory": "6Gi"}}
    assert "--set=pool.blocks=1048576" in container["args"]


def test_models_have_host_names_of_their_own_at_a_gateway() -> None:
    gateway: Values = {"enabled": True, "parent": {"name": "gateway"}, "hostname": "x.example.org"}
    base = merged(DEMO, {"httpRoute": gateway, "models": {"a": {"model": {"embedded": True}}}})

    def routed(**route: Json) -> set[str]:
        added = {"models": {"a": {"httpRoute": {"enabled": True, **route}}}}
        return owned(render(merged(base, added)), "HTTPRoute")

    both = {"chat-baton-router", "chat-baton-a-router"}
    assert routed(hostname="a.example.org") == both
    assert routed(hostname="x.example.org", parent={"name": "other"}) == both
    with pytest.raises(helm_python.HelmError, match="models.a.httpRoute.hostname is x.example.org"):
        routed(hostname="x.example.org")
    base = merged(base, {"httpRoute": {"hostname": ""}})
    with pytest.raises(helm_python.HelmError, match="hostname is empty .all host names., which an"):
        routed()


def test_zeros_of_a_model_count() -> None:
    gpus = {"prefill": {"gpu": {"count": 1}}, "workers": {"settings": {"worker.device": "auto"}}}
    without = {"model": {"embedded": True}, "prefill": {"gpu": {"count": 0}}}
    release = render(merged(DEMO, gpus, {"models": {"a": without}}))
    assert "nvidia.com/gpu" in str(release.named("StatefulSet", "baton-prefill"))
    assert "nvidia.com/gpu" not in str(release.named("StatefulSet", "a-prefill"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"models": {"a": {}}}, "models.a|model.*required|missing"),
        ({"models": {"a": {"model": {}}}}, "models.a: model: 0 of model.embedded"),
        (
            {"models": {"a": {"model": {"embedded": True}, "decode": {"gpu": {"resource": "x"}}}}},
            "models.a: decode.gpu.resource is x, which no device plugin offers",
        ),
        ({"models": {"A": {"model": {"embedded": True}}}}, "models is A; give at most 16"),
        ({"models": {"a": {"model": {"embedded": True}, "redis": {}}}}, "redis|additional"),
        (
            {
                "ingress": {"enabled": True, "host": "x.example.org"},
                "models": {"a": {"model": {"embedded": True},
                                 "ingress": {"enabled": True, "host": "x.example.org"}}},
            },
            "models.a.ingress.host is x.example.org, which another model of the release has",
        ),
    ],
)  # fmt: skip
def test_a_bad_value_of_a_model_is_named(change: Values, words: str) -> None:
    with pytest.raises(helm_python.HelmError, match=words):
        render(merged(DEMO, change))


def test_a_long_name_of_a_release_stays_a_name() -> None:
    release = render(BASE, name="a" * 53)
    for document in release.documents:
        assert len(document["metadata"]["name"]) <= 63


@pytest.mark.parametrize("orchestrator", ["plain", "kuberay"])
def test_equal_releases_of_two_namespaces_are_two_clusters(orchestrator: str) -> None:
    """They may share a Redis server, whose keys begin with the cluster's name."""
    models = {key: {"model": {"embedded": True}} for key in ("a", "b" * 16)}
    values = merged(DEMO, {"orchestrator": orchestrator, "models": models})
    long = "n" * 62
    found = set[str]()
    for namespace in ("llm", "test", f"{long}1", f"{long}2"):
        named = {
            (labels[NAME], each["value"])
            for labels, spec in render(values, namespace=namespace).pods()
            for container in spec["containers"]
            for each in container.get("env", ())
            if each["name"] == "BATON_REGISTRY__CLUSTER" and labels[COMPONENT] == "router"
        }
        clusters = {cluster for _, cluster in named}
        assert len(named) == len(clusters) == 3 and not clusters & found
        found |= clusters
    for cluster in found:
        key_prefix(RegistryConfig(cluster=cluster))
