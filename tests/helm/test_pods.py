"""The runner of pods keeps to Kubernetes' rules: what controllers do next, what policies admit,
what names mean. Without namespaces; test_running_release.py has them."""

from __future__ import annotations

import os
import re
import shlex
import socket
import stat
import struct
from pathlib import Path

import pytest

from baton.deploy.host.release_secrets import create_credentials
from baton.deploy.host.secrets_api import SecretsApi
from baton.runtime.errors import BatonError
from tests.support.chart import example, merged, render
from tests.support.pods.container import ContainerSite
from tests.support.pods.dns import answered
from tests.support.pods.kuberay import operated, patched
from tests.support.pods.manifests import (
    evictions_allowed,
    hooks_of,
    refuse_changes,
    restarted,
    service_address,
    with_restarts,
)
from tests.support.pods.network import Endpoint, policy_rules, selects, service_rules
from tests.support.pods.pod import Probing, expanded
from tests.support.pods.scales import Scales
from tests.support.pods.secrets_server import SecretsServer
from tests.support.pods.volumes import refresh_secret, volumes_of
from tests.support.pods.workloads import (
    Actions,
    PodState,
    deployment,
    fully_new,
    next_actions,
    ray_group,
    revision_of,
    settled,
    stateful_set,
)

HOOK = {"app.kubernetes.io/name": "baton-hook", "app.kubernetes.io/instance": "chat"}
KUBERAY = {"orchestrator": "kuberay"}


def pod(
    number: int, revision: str = "new", ready: bool = True, terminating: bool = False
) -> PodState:
    return PodState(f"p-{number}", revision, ready, terminating, number)


def test_a_stateful_set_makes_all_missing_pods_and_ends_the_last() -> None:
    assert stateful_set(3, "new", [pod(1)]) == Actions(make=(0, 2))
    assert stateful_set(1, "new", [pod(0), pod(1), pod(2)]).end == ("p-1", "p-2")
    assert stateful_set(1, "new", [pod(0), pod(1, terminating=True)]) == Actions()


def test_a_stateful_set_replaces_one_pod_at_a_time_from_the_last() -> None:
    old = [pod(0, "old"), pod(1, "old")]
    assert stateful_set(2, "new", old).end == ("p-1",)
    assert stateful_set(2, "new", [pod(0, "old"), pod(1, ready=False)]) == Actions()
    assert stateful_set(2, "new", [pod(0, "old"), pod(1)]).end == ("p-0",)
    failed = [pod(0), pod(1, "failed", ready=False)]  # of an upgrade that is rolled back
    assert stateful_set(2, "new", failed).end == ("p-1",)
    assert fully_new(2, "new", [pod(0), pod(1)]) and not fully_new(2, "new", old)


def test_a_deployment_never_has_fewer_ready_pods_than_wanted() -> None:
    old = [pod(0, "old"), pod(1, "old")]
    assert deployment(2, "new", old, 7) == Actions(make=(7,))
    assert deployment(2, "new", [*old, pod(7, ready=False)], 8) == Actions()
    assert deployment(2, "new", [*old, pod(7)], 8).end == ("p-0",)
    leaving = [pod(0, "old", ready=False, terminating=True), pod(1, "old"), pod(7)]
    assert deployment(2, "new", leaving, 8) == Actions(make=(8,))
    assert deployment(2, "new", [], 0) == Actions(make=(0, 1))


def test_a_ray_group_keeps_its_pods_until_they_are_named() -> None:
    old = [pod(3, "old"), pod(4, "old")]
    assert ray_group(2, [], old, 7) == Actions()
    assert ray_group(2, ["p-3"], old, 7) == Actions(make=(7,), end=("p-3",))
    ending = [pod(3, "old", terminating=True), pod(4, "old")]
    assert ray_group(2, ["p-3"], [*ending, pod(7)], 8) == Actions()
    assert ray_group(2, [], ending, 8) == Actions()  # it counts until it is gone
    assert ray_group(1, [], old, 8).end == ("p-3",)


def test_a_stateful_set_keeps_pods_until_they_are_deleted() -> None:
    strategy = {"updateStrategy": {"type": "OnDelete"}}
    spec = {"replicas": 2, "template": {}} | strategy
    document = {"kind": "StatefulSet", "metadata": {"name": "p"}, "spec": spec}
    old = [pod(0, "old"), pod(1, "old")]
    assert next_actions(document, old, 0) == Actions() and settled(document, old)
    assert next_actions(document, old[:1], 0) == Actions(make=(1,))
    rolling = document | {"spec": {"replicas": 2, "template": {}}}
    assert next_actions(rolling, old, 0).end == ("p-1",) and not settled(rolling, old)


def test_a_budget_counts_the_pods_that_its_controllers_want() -> None:
    budget = {"spec": {"maxUnavailable": 1}}
    assert evictions_allowed(budget, wanted=2, ready=2) == 1
    assert evictions_allowed(budget, wanted=2, ready=1) == 0
    assert evictions_allowed({"spec": {"minAvailable": 2}}, wanted=9, ready=2) == 0


def test_a_patch_is_refused_where_its_test_fails() -> None:
    document = {"spec": {"groups": [{"name": "a"}, {"name": "b"}]}}
    check = {"op": "test", "path": "/spec/groups/1/name", "value": "b"}
    add = {"op": "add", "path": "/spec/groups/1/size", "value": 2}
    assert patched(document, [check, add])["spec"]["groups"][1] == {"name": "b", "size": 2}
    assert document["spec"]["groups"][1] == {"name": "b"}
    with pytest.raises(ValueError, match="/spec/groups/1/name is b"):
        patched(document, [{**check, "value": "a"}])
    with pytest.raises(ValueError, match="remove"):
        patched(document, [{"op": "remove", "path": "/spec/groups"}])


def test_ray_starts_with_the_flags_that_kuberay_adds() -> None:
    (cluster,) = render(merged(example("cpu-demo"), KUBERAY)).of_kind("RayCluster")
    head, prefill, _, service = operated(cluster)
    (ray, _) = head["spec"]["template"]["spec"]["containers"]
    assert "ray start --head --block --dashboard" in ray["args"][0]
    assert "--include-dashboard=false" in ray["args"][0] and "--num-cpus=0" in ray["args"][0]
    pod = prefill["spec"]["template"]["spec"]
    command = shlex.split(pod["containers"][0]["args"][0])
    address = "chat-baton-ray-head-svc.llm.svc.cluster.local:6379"
    assert {f"--address={address}", "--memory=4294967296", "--num-cpus=1"} <= set(command)
    assert '--resources={"baton-prefill": 1}' in command
    waiting = pod["initContainers"][-1]
    assert f"ray health-check --address {address}" in waiting["args"][0]
    labels = head["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_probes_fail_after_their_threshold_and_pass_again() -> None:
    probing = Probing({"periodSeconds": 2, "failureThreshold": 2}, 0.0)
    assert probing.due(1.0) and not probing.due(2.9) and probing.due(3.0)
    for good, passed in ((True, True), (False, True), (False, False), (True, True)):
        probing.saw(good)
        assert probing.passed is passed


def test_selectors_take_labels_and_refuse_what_they_do_not_know() -> None:
    one = {"matchExpressions": [{"key": "a", "operator": "In", "values": ["x"]}]}
    assert selects(one, {"a": "x"}) and not selects(one, {"a": "y"}) and selects({}, {})
    with pytest.raises(ValueError, match="Exists"):
        selects({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {})


def test_policies_become_rules_of_the_pods_they_admit() -> None:
    release = render(example("cpu-demo"))
    parts = {"router": "10.1.0.2", "decode": "10.1.0.3", "prefill": "10.1.0.4", "redis": "10.1.0.5"}
    found = {
        labels["app.kubernetes.io/component"]: Endpoint(name, parts[name], labels, ready=True)
        for labels, _ in release.pods()
        if (name := labels.get("app.kubernetes.io/component", "")) in parts
    }
    policies = release.of_kind("NetworkPolicy")
    rules = {
        name: policy_rules(each, policies, list(found.values()), "10.1.0.1")
        for name, each in found.items()
    }
    assert "ip saddr { 10.1.0.2, 10.1.0.3, 10.1.0.4 } tcp dport 6379 accept" in rules["redis"]
    assert "ip saddr { 10.1.0.3, 10.1.0.4 } tcp dport 20000-20999 accept" in rules["decode"]
    assert "10.1.0.2 } tcp dport 9001" not in rules["decode"]
    assert all(text.count("drop") == 2 for text in rules.values())
    hook = Endpoint("secrets", "10.1.0.8", {**HOOK}, ready=False)
    ports = re.findall(r"(\w+ dport \d+) accept", policy_rules(hook, policies, [], "10.1.0.1"))
    assert ports == ["udp dport 53", "tcp dport 53", "tcp dport 443", "tcp dport 6443"]
    assert policy_rules(hook, policies, [], "10.1.0.1").count("drop") == 2
    stranger = Endpoint("stranger", "10.1.0.9", {"app": "other"}, ready=True)
    assert "drop" not in policy_rules(stranger, policies, [], "10.1.0.1")


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes files of a pod's group")
def test_a_config_map_is_a_folder_that_a_pod_reads(tmp_path: Path) -> None:
    """No pod of the chart mounts one: Grafana's sidecar reads the dashboards by the API."""
    site = ContainerSite((), tmp_path, "p", 10001, 10001, "10.1.0.1", "")
    maps = {"own": {"kind": "ConfigMap", "data": {"a.json": "{}", "b": "text"}}}
    spec = {"volumes": [{"name": "files", "configMap": {"name": "own"}}]}
    server = SecretsServer("127.0.0.1", "llm", tmp_path / "api")
    try:
        mount = volumes_of(spec, site, tmp_path, server, maps)["files"]
        files = [each for each in mount.source.iterdir() if each.is_file()]
        assert {each.name: each.read_text() for each in files} == maps["own"]["data"]
        assert mount.read_only and mount.source.joinpath("b").stat().st_mode & 0o777 == 0o644
        with pytest.raises(KeyError, match="own"):
            volumes_of(spec, site, tmp_path, server, {})
    finally:
        server.close()


def test_a_service_sends_to_ready_pods_and_refuses_without() -> None:
    rules = service_rules({("10.96.1.2", 8000): [("10.1.0.2", 8000), ("10.1.0.3", 8000)]})
    assert "numgen random mod 2 == 0 dnat to 10.1.0.2:8000" in rules
    assert "tcp dport 8000 dnat to 10.1.0.3:8000" in rules and "reject" in rules
    assert service_address("a") == service_address("a") != service_address("b")


def test_names_are_answered_and_unknown_ones_denied() -> None:
    query = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + b"\x01a\x03llm\x00" + b"\x00\x01\x00\x01"
    good = answered(query, lambda name: ["10.1.0.2"] if name == "a.llm" else None)
    assert good.endswith(socket.inet_aton("10.1.0.2")) and good[:2] == b"\x00\x07"
    bad = answered(query, lambda name: None)
    assert bad[3] & 15 == 3 and struct.unpack_from("!H", bad, 6) == (0,)


def test_a_stateful_set_without_a_number_keeps_its_own() -> None:
    """As Kubernetes does: one pod at first, and an upgrade changes nothing."""
    scales = Scales()
    document = {"kind": "StatefulSet", "metadata": {"name": "w"}, "spec": {"serviceName": "w"}}
    assert scales.applied(document)["spec"] == {"serviceName": "w", "replicas": 1}
    scales.put("w", 4)
    assert scales.applied(document)["spec"]["replicas"] == 4
    assert scales.applied(document | {"spec": {"replicas": 2}})["spec"]["replicas"] == 2
    assert scales.applied({"kind": "Service"}) == {"kind": "Service"}


def test_an_upgrade_that_changes_an_immutable_field_is_refused() -> None:
    job = {"kind": "Job", "metadata": {"name": "m"}, "spec": {"template": {"spec": {}}}}
    refuse_changes(None, job)
    refuse_changes(job, job)
    with pytest.raises(ValueError, match="Job m: spec.template: field is immutable"):
        refuse_changes(job, job | {"spec": {"template": {"spec": {"restartPolicy": "Never"}}}})
    pool = {"kind": "StatefulSet", "metadata": {"name": "w"}, "spec": {"serviceName": "w"}}
    refuse_changes(pool, pool | {"spec": {"serviceName": "w", "replicas": 2}})
    with pytest.raises(ValueError, match="spec.serviceName: field is immutable"):
        refuse_changes(pool, pool | {"spec": {"serviceName": "v"}})


def test_a_restart_lasts_over_an_upgrade_as_helm_leaves_it() -> None:
    pools = {"kind": "Deployment", "spec": {"template": {"metadata": {"labels": {"a": "b"}}}}}
    marked = restarted(pools, "now")
    assert revision_of(marked["spec"]["template"]) != revision_of(pools["spec"]["template"])
    assert with_restarts(marked, pools) == marked and with_restarts(pools, pools) == pools


def test_a_mounted_secret_changes_at_once(tmp_path: Path) -> None:
    server = SecretsServer("127.0.0.1", "llm", tmp_path / "api")
    spec = {"volumes": [{"name": "tls", "secret": {"secretName": "s", "defaultMode": 0o440}}]}
    site = ContainerSite((), tmp_path, "p-0", 0, 0, "", "")
    try:
        server.put("s", {"a": b"1", "b": b"1"})
        folder = volumes_of(spec, site, tmp_path, server, {})["tls"].source
        server.put("s", {"a": b"2", "b": b"2"})
        assert (folder / "a").read_bytes() == b"1"
        refresh_secret(spec, site, "s", server)
        assert [(folder / name).read_bytes() for name in "ab"] == [b"2", b"2"]
        assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o440
        assert (folder / "a").readlink() == Path("..data/a")
    finally:
        server.close()


def test_a_mounted_secret_changes_by_its_items(tmp_path: Path) -> None:
    server = SecretsServer("127.0.0.1", "llm", tmp_path / "api")
    items = [{"key": "a", "path": "renamed"}]
    spec = {"volumes": [{"name": "tls", "secret": {"secretName": "s", "items": items}}]}
    site = ContainerSite((), tmp_path, "p-0", 0, 0, "", "")
    try:
        server.put("s", {"a": b"1", "b": b"1"})
        folder = volumes_of(spec, site, tmp_path, server, {})["tls"].source
        server.put("s", {"a": b"2", "b": b"2"})
        refresh_secret(spec, site, "s", server)
        found = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
        assert found == {"renamed": b"2"}
    finally:
        server.close()


def test_names_in_arguments_are_replaced_and_unknown_ones_stay() -> None:
    assert expanded("$(A) $(B)", {"A": "x"}) == "x $(B)"


def test_an_account_may_do_what_its_role_says(tmp_path: Path) -> None:
    release = render(merged(example("cpu-demo"), {"tls": {"mode": "off"}}))
    server = SecretsServer("127.0.0.1", "llm", tmp_path / "api")
    try:
        files = server.mounted_account("chat-baton-secrets", tmp_path / "account")
        api = SecretsApi("llm", "127.0.0.1", server.port, files)
        with pytest.raises(BatonError, match="403"):
            create_credentials(api, "chat-baton")
        (role,) = [each for each in release.of_kind("Role") if "pre-install" in hooks_of(each)]
        server.roles["chat-baton-secrets"] = role["rules"]
        assert create_credentials(api, "chat-baton") and not create_credentials(api, "chat-baton")
        assert api.read("chat-baton-secrets") is not None
        with pytest.raises(BatonError, match="403"):
            api.read("another")
    finally:
        server.close()
    assert server.refused == [
        "chat-baton-secrets create chat-baton-secrets", "chat-baton-secrets get another",
    ]  # fmt: skip
