"""The chart with orchestrator kuberay: what a RayCluster asks of KubeRay and `baton fleet`."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest

from baton.deploy.cli.main import parser
from baton.deploy.host.own_topology import VARIABLE
from baton.deploy.nodes.fleet_plan import FleetOptions
from baton.deploy.nodes.ray_pods import RayPod, deletion_patch
from baton.runtime.settings.loading import load
from tests.support.chart import (
    CRDS,
    Document,
    Release,
    Values,
    custom_schemas,
    example,
    merged,
    render,
)
from tests.support.chart_choices import MONITORED
from tests.support.json_values import Json
from tests.support.pods.kuberay import operated, patched

KUBERAY = {"orchestrator": "kuberay"}
CHANGES: tuple[Values, ...] = (
    {"image": {"worker": "baton-worker:9"}},
    {"image": {"pullSecrets": ["registry"]}},
    {"model": {"revision": "0a1b2c"}},
    {"workers": {"settings": {"pool.blocks": 9}}},
    {"workers": {"drainSeconds": 7}},
    {"workers": {"kvDevices": "eth1"}},
    {"prefill": {"resources": {"requests": {"cpu": "3"}}}},
    {"decode": {"nodeSelector": {"gpu": "h200"}}},
    {"decode": {"rdma": {"resource": "rdma/hca", "count": 1}}},
    {"kuberay": {"head": {"resources": {"limits": {"memory": "9Gi"}}}}},
    {"redis": {"enabled": False, "url": "rediss://redis"}, "secrets": {"existing": "mine"}},
    {"tls": {"mode": "off"}},
    {"topologySpread": False},
    merged(MONITORED, {"monitoring": {"otlpEndpoint": "otel:4317"}}),
)


@pytest.fixture(scope="module")
def release() -> Release:
    return render(merged(example("single-node-8gpu"), KUBERAY))


def cluster_of(release: Release) -> Json:
    (cluster,) = release.of_kind("RayCluster")
    return cluster["spec"]


def group(release: Release, role: str) -> Document:
    (found,) = [e for e in cluster_of(release)["workerGroupSpecs"] if e["groupName"] == role]
    return found


def fleet_container(release: Release) -> Document:
    containers = cluster_of(release)["headGroupSpec"]["template"]["spec"]["containers"]
    (found,) = [each for each in containers if each["name"] == "fleet"]
    return found


def test_workers_are_groups_of_a_raycluster_and_routers_are_not(release: Release) -> None:
    values = example("single-node-8gpu")
    for role in ("prefill", "decode"):
        made = group(release, role)
        count = values[role]["replicas"]
        assert made["replicas"] == made["minReplicas"] == made["maxReplicas"] == count
    names = [each["metadata"]["name"] for each in release.of_kind("StatefulSet")]
    assert [name.partition("-baton-")[2] for name in names] == ["redis", "ray-redis"]
    assert release.named("Deployment", "router")
    assert cluster_of(release)["upgradeStrategy"] == {"type": "None"}
    assert cluster_of(release)["authOptions"] == {"mode": "token"}


def test_each_pod_offers_one_worker_of_its_role(release: Release) -> None:
    """KubeRay writes the parameters into a shell's command as they are."""
    for role in ("prefill", "decode"):
        parameters = group(release, role)["rayStartParams"]
        assert all(isinstance(value, str) for value in parameters.values())
        (text,) = shlex.split(parameters["resources"])
        assert json.loads(text) == {f"baton-{role}": 1}
    head = cluster_of(release)["headGroupSpec"]["rayStartParams"]
    assert (head["num-cpus"], head["num-gpus"], head["include-dashboard"]) == ("0", "0", "false")


@pytest.mark.parametrize("values", [{}, {"prefill": {"gpu": {"count": 0}}}])
def test_the_fleet_s_command_asks_for_what_the_groups_offer(
    values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = render(merged(example("single-node-8gpu"), KUBERAY, values))
    container = fleet_container(release)
    environ = {each["name"]: each.get("value", "a-secret") for each in container["env"]}
    given = parser().parse_args([*container["command"][1:], *container["args"]])
    assert given.by_role and given.leave_workers and given.cpus == 0
    fleet = FleetOptions(
        config=load(None, environ, {}),
        settings={},
        prefill=given.prefill,
        decode=given.decode,
        model=given.model,
        cpus=given.cpus,
        prefill_gpus=given.prefill_gpus,
        decode_gpus=given.decode_gpus,
        by_role=given.by_role,
    )
    fleet.check()
    for order in fleet.orders():
        made = group(release, order.role)
        limits = made["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert order.gpus == limits.get("nvidia.com/gpu", 0)
        assert float(made["rayStartParams"]["num-gpus"]) == order.gpus
        assert order.resources() == {f"baton-{order.role}": 1.0}
    assert sum(order.role == "prefill" for order in fleet.orders()) == given.prefill


def test_the_fleet_s_metrics_are_scraped_at_its_port() -> None:
    namespace = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    monitored = {
        "monitoring": {"enabled": True}, "networkPolicy": {"monitoring": [namespace]}
    }  # fmt: skip
    release = render(merged(example("single-node-8gpu"), KUBERAY, monitored))
    container = fleet_container(release)
    given = parser().parse_args([*container["command"][1:], *container["args"]])
    environ = {each["name"]: each.get("value", "a-secret") for each in container["env"]}
    assert load(None, environ, {}).worker.host == "0.0.0.0"
    assert container["ports"] == [{"name": "admin", "containerPort": given.admin_port}]
    monitor = release.named("PodMonitor", "ray-head")
    labels = cluster_of(release)["headGroupSpec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("admin", "/metrics")
    ingress = release.named("NetworkPolicy", "ray-head")["spec"]["ingress"]
    admin = {"protocol": "TCP", "port": given.admin_port}
    assert any(namespace in each["from"] and each["ports"] == [admin] for each in ingress)


def test_workers_find_a_head_that_is_not_ready(release: Release) -> None:
    """It is not before they have joined. KubeRay keeps what a given Service says."""
    service = cluster_of(release)["headGroupSpec"]["headService"]
    assert service == {"spec": {"clusterIP": "None", "publishNotReadyAddresses": True}}


def test_the_head_s_certificate_is_of_the_clusters_zone() -> None:
    zone = {"kuberay": {"clusterDomain": "k8s.example"}}
    for values, expected in (({}, "cluster.local"), (zone, "k8s.example")):
        cluster = cluster_of(render(merged(example("single-node-8gpu"), KUBERAY, values)))
        head = cluster["headGroupSpec"]["template"]["spec"]["initContainers"]
        assert f"chat-baton-ray-head-svc.llm.svc.{expected}" in str(head)


def test_secrets_come_from_the_pods_alone(release: Release) -> None:
    worker = group(release, "decode")["template"]["spec"]["containers"][0]
    references = {
        each["name"]: each["valueFrom"]["secretKeyRef"]["key"]
        for each in worker["env"]
        if "secretKeyRef" in each.get("valueFrom", {})
    }
    assert references == {
        "BATON_TOKEN": "token",
        "BATON_TOKEN_ALSO": "token-also",
        "BATON_IDENTITY_SECRET": "identity-secret",
        "BATON_REGISTRY__PASSWORD": "redis-password",
    }
    assert {"name": "tls", "mountPath": "/etc/baton/tls", "readOnly": True} in worker[
        "volumeMounts"
    ]
    password = cluster_of(release)["gcsFaultToleranceOptions"]["redisPassword"]
    assert password["valueFrom"]["secretKeyRef"]["key"] == "redis-password"
    arguments = json.dumps([fleet_container(release)["args"], worker.get("args")])
    assert "TOKEN" not in arguments and "password" not in arguments


def test_a_pod_drains_before_ray_ends_in_it(release: Release) -> None:
    pod = group(release, "prefill")["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    given = parser().parse_args(command[1:])
    assert pod["terminationGracePeriodSeconds"] > given.within > 120


def test_pods_wait_ten_minutes_for_a_lost_head(release: Release) -> None:
    """Ray's own time is one minute, after which each raylet would end, and its worker's actor."""
    (cluster,) = release.of_kind("RayCluster")
    waits = "RAY_gcs_rpc_server_reconnect_timeout_s"
    for group_of_pods in operated(cluster)[1:3]:
        environment = group_of_pods["spec"]["template"]["spec"]["containers"][0]["env"]
        assert [each["value"] for each in environment if each["name"] == waits] == ["600"]


def test_settings_of_a_pool_are_in_its_pods_environment() -> None:
    values = {
        "decode": {"settings": {"step.max_sequences": 128}},
        "workers": {"settings": {"pool.blocks": 9}},
    }
    release = render(merged(example("cpu-demo"), KUBERAY, values))
    worker = group(release, "decode")["template"]["spec"]["containers"][0]
    environ = {
        e["name"]: e["value"].replace("$(POD_IP)", "10.1.2.3")
        for e in worker["env"]
        if "value" in e
    }
    config = load(None, environ, {})
    assert (config.step.max_sequences, config.pool.blocks) == (128, 9)
    assert (config.worker.host, config.worker.advertise) == ("0.0.0.0", "10.1.2.3")


def templates(release: Release) -> dict[str, Document]:
    spec = cluster_of(release)
    groups = {each["groupName"]: each["template"] for each in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"], **groups}


def test_a_pod_that_changes_has_another_annotation() -> None:
    """`baton release replace` finds old pods by it."""
    base = merged(example("production"), KUBERAY)
    before = templates(render(base))
    changed = set()
    for values in CHANGES:
        for name, after in templates(render(merged(base, values))).items():
            if after["spec"] != before[name]["spec"]:
                changed.add(name)
                assert after["metadata"]["annotations"] != before[name]["metadata"]["annotations"]
    assert changed == {"head", "prefill", "decode"}


def test_pods_keep_their_annotation_when_others_change() -> None:
    base = merged(example("production"), KUBERAY)
    before = templates(render(base))
    decode = {"decode": {"replicas": 9, "settings": {"pool.blocks": 9}}}
    after = templates(render(merged(base, decode, {"router": {"replicas": 5}})))
    kept = [name for name in before if after[name]["metadata"] == before[name]["metadata"]]
    assert kept == ["prefill"]
    more = templates(render(merged(base, {"decode": {"replicas": 9}})))
    kept = [name for name in before if more[name]["metadata"] == before[name]["metadata"]]
    assert kept == ["prefill", "decode"]


@pytest.mark.skipif(not CRDS.is_dir(), reason=f"no custom resource definitions at {CRDS}")
def test_kuberay_accepts_the_patch_of_workers_to_delete(release: Release, tmp_path: Path) -> None:
    (cluster,) = release.of_kind("RayCluster")
    pod = RayPod("chat-baton-ray-decode-worker-x7k2p", "decode", False, True, False)
    operations = deletion_patch(cluster, pod, [pod])
    accepts = jsonschema.Draft202012Validator(custom_schemas()["RayCluster"]).validate
    after = patched(cluster, operations)
    accepts(after)
    assert after["spec"]["workerGroupSpecs"][1]["scaleStrategy"]["workersToDelete"] == [pod.name]
    for wrong in ({"workersToDelete": pod.name}, {"workers": [pod.name]}):
        with pytest.raises(jsonschema.ValidationError):
            accepts(patched(cluster, [{**operations[-1], "value": wrong}]))
    if (kubectl := shutil.which("kubectl")) is not None:
        path = tmp_path / "raycluster.json"
        path.write_text(json.dumps(cluster))
        command = [kubectl, "patch", "--local", "-f", str(path), "--type=json", "-o", "json"]
        done = subprocess.run(
            [*command, "-p", json.dumps(operations)], capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout) == after


def test_workers_are_where_their_pods_labels_say() -> None:
    """By Kubernetes or by KubeRay; variables of a value stand before it, so that it has theirs."""
    labels = ["topology.kubernetes.io/zone", "example.org/rack"]
    values = merged(example("cpu-demo"), {"workers": {"topologyLabels": labels}})
    release = render(merged(values, KUBERAY))
    plain = render(values).named("StatefulSet", "decode")["spec"]["template"]
    for pod in (plain, group(release, "prefill")["template"]):
        env = pod["spec"]["containers"][0]["env"]
        taken = [each for each in env if "TOPOLOGY" in each["name"]]
        paths = [each["valueFrom"]["fieldRef"]["fieldPath"] for each in taken[:-1]]
        assert paths == [f"metadata.labels['{label}']" for label in labels]
        names = [each["name"] for each in taken[:-1]]
        assert taken[-1] == {"name": VARIABLE, "value": "/".join(f"$({name})" for name in names)}
    assert all("TOPOLOGY" not in json.dumps(pod) for _, pod in render(example("cpu-demo")).pods())
