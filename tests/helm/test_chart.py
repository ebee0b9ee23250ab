"""The chart, rendered by real Helm: valid objects, and policies that hold in each release."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

import jsonschema
import pytest

from baton.deploy.cli.arguments import config_of
from baton.deploy.cli.main import parser
from tests.support.chart import (
    CRDS,
    CUSTOM,
    FOLDER,
    FOREIGN,
    ROOT,
    Document,
    Release,
    Values,
    chart,
    custom_schemas,
    example,
    merged,
    render,
    validate,
)
from tests.support.chart_choices import CHOICES, EXAMPLES, drawn_choices, each_choice, fitting
from tests.support.published_crds import PUBLISHED

(OLDEST,) = re.findall(r'kubeVersion: ">=(1\.\d+)', (FOLDER / "Chart.yaml").read_text())
VERSIONS = (OLDEST, "1.35", "1.36", "1.37")
OWN_FILES = {  # paths, no secrets
    "BATON_SECURITY__KEY": "/etc/baton/tls/tls.key",
    "RAY_REDIS_CLIENT_KEY": "/etc/baton/tls/tls.key",
    "RAY_TLS_SERVER_KEY": "/etc/baton/ray/tls/node.key",
}
WORKERS = ("prefill", "decode", "worker")


@pytest.fixture(
    scope="module", params=[each_choice, pytest.param(drawn_choices, marks=pytest.mark.nightly)]
)
def releases(request: pytest.FixtureRequest) -> list[Release]:
    return [render(values) for values in request.param()]


@pytest.fixture(scope="module")
def unlike(releases: list[Release]) -> list[Document]:
    """Each unlike document of all releases once."""
    documents = itertools.chain.from_iterable(release.documents for release in releases)
    return list({json.dumps(each, sort_keys=True): each for each in documents}.values())


def containers(release: Release) -> Iterator[tuple[Document, Document]]:
    for labels, pod in release.pods():
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            yield labels, container


def test_every_object_is_valid_in_each_version_of_kubernetes(unlike: list[Document]) -> None:
    seen = set()
    for document in unlike:
        if document["kind"] not in FOREIGN:
            seen.add(document["kind"])
            for version in VERSIONS:
                validate(document, version)
    assert {"Deployment", "StatefulSet", "NetworkPolicy", "PodDisruptionBudget", "Job"} <= seen


@pytest.mark.skipif(not CRDS.is_dir(), reason=f"no custom resource definitions at {CRDS}")
def test_custom_resources_have_no_unknown_field(unlike: list[Document]) -> None:
    schemas = custom_schemas()
    found = [document for document in unlike if document["kind"] in schemas]
    assert {document["kind"] for document in found} == CUSTOM
    for document in found:
        jsonschema.Draft202012Validator(schemas[document["kind"]]).validate(document)
    with pytest.raises(jsonschema.ValidationError):
        wrong = merged(found[0], {"spec": {"unknown": 1}})
        jsonschema.Draft202012Validator(schemas[wrong["kind"]]).validate(wrong)


def test_objects_of_other_projects_have_known_fields(unlike: list[Document]) -> None:
    """Of cert-manager and the Gateway API, whose definitions are not at hand."""
    found = [document for document in unlike if document["kind"] in PUBLISHED]
    assert {document["kind"] for document in found} == set(PUBLISHED)
    for document in found:
        jsonschema.Draft202012Validator(PUBLISHED[document["kind"]]).validate(document)
        wrong = merged(document, {"spec": {"unknown": 1}})
        with pytest.raises(jsonschema.ValidationError, match="unknown"):
            jsonschema.Draft202012Validator(PUBLISHED[wrong["kind"]]).validate(wrong)


def test_two_renders_are_equal() -> None:
    sized = {key: CHOICES[key][-1] for key in ("autoscaling", "models")}
    for name, started, form in itertools.product(EXAMPLES, CHOICES["orchestrator"], ({}, sized)):
        values = fitting(merged(example(name), form, {"orchestrator": started}))
        first = chart().render(values, name="chat", namespace="llm")
        assert first == chart().render(values, name="chat", namespace="llm")


def test_containers_are_confined(releases: list[Release]) -> None:
    for release in releases:
        for _, pod in release.pods():
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert pod["enableServiceLinks"] is False
            assert "hostNetwork" not in pod and "hostPID" not in pod and "hostIPC" not in pod
        for _, container in containers(release):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"]["drop"] == ["ALL"]
            needs_lock = any("rdma" in name for name in container["resources"]["limits"])
            assert security["capabilities"].get("add", []) == (["IPC_LOCK"] if needs_lock else [])
            assert "memory" in container["resources"]["limits"]
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])


def test_workers_and_ray_share_memory_in_a_volume(releases: list[Release]) -> None:
    """A container's own /dev/shm has 64 MiB; UCX, torch and Ray need more."""
    found = set()
    for release in releases:
        for labels, pod in release.pods():
            component = labels.get("app.kubernetes.io/component", "")
            if component not in (*WORKERS, "ray-head"):
                continue
            found.add(component)
            volumes = {each["name"]: each for each in pod["volumes"]}
            for container in pod["containers"]:
                (mount,) = [e for e in container["volumeMounts"] if e["mountPath"] == "/dev/shm"]
                memory = volumes[mount["name"]]["emptyDir"]
                assert memory["medium"] == "Memory" and re.match(r"\d+[MG]i$", memory["sizeLimit"])
                assert not mount.get("readOnly")
    assert found == {*WORKERS, "ray-head"}


def test_every_pod_may_pull_from_a_private_registry(releases: list[Release]) -> None:
    """The pods are of each kind that any release has."""
    pull: Values = {"image": {"pullSecrets": ["ours", "theirs"]}}
    sized = {"autoscaling": CHOICES["autoscaling"][-1], "models": CHOICES["models"][-1]}
    forms = [fitting({"orchestrator": each, **sized}) for each in CHOICES["orchestrator"]]
    named = [render(merged(example("cpu-demo"), form, pull)) for form in forms]
    for release in named:
        for _, pod in release.pods():
            assert pod["imagePullSecrets"] == [{"name": "ours"}, {"name": "theirs"}]
    seen = {container["name"] for each in named for _, container in containers(each)}
    assert seen >= {container["name"] for each in releases for _, container in containers(each)}


def test_accounts_tokens_are_mounted_where_they_are_used(releases: list[Release]) -> None:
    """The hook's, and those of controllers that change the number of workers."""
    for release in releases:
        using = [job for job in release.of_kind("Job") if "secrets" in job["metadata"]["name"]]
        using += [each for each in release.of_kind("Deployment") if "--resize=" in str(each)]
        named = sorted(each["metadata"]["name"] for each in using)
        mounted = [pod for _, pod in release.pods() if pod["automountServiceAccountToken"]]
        assert sorted(pod["serviceAccountName"] for pod in mounted) == named
        bound = [
            subject["name"]
            for each in release.of_kind("RoleBinding")
            for subject in each["subjects"]
        ]
        assert sorted(bound) == named


def test_liveness_is_apart_from_readiness(releases: list[Release]) -> None:
    """Of all pods that stay. Those of RayClusters live as long as Ray's port is open: the worker's
    supervisor watches the worker."""
    seen = set()
    for release in releases:
        for _, pod in release.pods():
            if pod.get("restartPolicy") in ("Never", "OnFailure"):
                continue  # it ends by itself
            for container in pod["containers"]:
                assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
                alive, ready = container["livenessProbe"], container["readinessProbe"]
                seen.add(container["name"].partition("-")[0])
                if container["name"] in ("redis", "ray-head"):
                    continue
                assert ready["httpGet"]["path"] == "/readyz"
                if alive.get("tcpSocket") != {"port": "raylet"}:
                    assert alive["httpGet"]["path"] in ("/livez", "/healthz")
    assert {"router", "worker", "controller", "redis", "ray", "fleet"} <= seen


def test_pods_get_the_time_that_they_take_to_drain(releases: list[Release]) -> None:
    for release in releases:
        for document in release.of_kind("Deployment", "StatefulSet"):
            pod = document["spec"]["template"]["spec"]
            for container in pod["containers"]:
                given = dict(
                    re.findall(r"--set=(\S+?)=(\S+)", "\n".join(container.get("args", [])))
                )
                needed = sum(float(given.get(name, 0)) for name in (
                    "router.drain_s", "router.leave_s", "worker.drain_s"))  # fmt: skip
                assert pod["terminationGracePeriodSeconds"] > needed


def test_no_secret_is_an_argument(releases: list[Release]) -> None:
    for release in releases:
        for _, container in containers(release):
            text = json.dumps([container.get("command"), container.get("args")])
            assert "requirepass" not in text or "$REDIS_PASSWORD" in text
            assert not re.search(r"--(token|password|api-key)|api_keys|://[^/\s\"]*@", text)
            for variable in container.get("env", []):
                if variable["name"] in OWN_FILES:
                    assert variable["value"] == OWN_FILES[variable["name"]]
                elif re.search("TOKEN(?!S)|KEY|PASSWORD", variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"]


def test_a_command_in_a_workers_pod_has_its_clusters_settings(
    releases: list[Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kubectl exec POD -- baton drain WORKER` gets no arguments of the pod's."""
    for release in releases:
        pods = [
            (labels["app.kubernetes.io/name"].removeprefix("baton-model"), spec)
            for labels, spec in release.pods()
            if labels.get("app.kubernetes.io/component") in WORKERS
        ]
        assert pods
        for model, pod in pods:
            (worker,) = pod["containers"]
            given = {each["name"]: each.get("value", "a-key") for each in worker["env"]}
            with monkeypatch.context() as patch:
                for name, value in given.items():
                    if name.startswith("BATON_"):
                        patch.setenv(name, value)
                config = config_of(parser().parse_args(["drain", "chat-baton-decode-0"]))
            assert config.registry.location.startswith("redis")
            assert config.registry.cluster == "llm_chat-baton" + model.removeprefix("baton")
            tls = config.security.tls == "on"
            assert bool(config.security.certificate) == bool(config.security.server_name) == tls
            if "-redis.llm:" in config.registry.location:  # the release's own
                assert config.registry.location.startswith("rediss://") == tls
                assert bool(config.registry.authority) == tls


def test_each_open_port_has_a_network_policy(releases: list[Release]) -> None:
    for release in releases:
        policies = release.of_kind("NetworkPolicy")
        if not policies:
            continue
        everything = [
            each
            for each in policies
            if each["metadata"]["name"].endswith(("default-deny", "-secrets"))
        ]
        for labels, pod in release.pods():
            (denied,) = [each["spec"] for each in everything
                         if _selects(each["spec"]["podSelector"], labels)]  # fmt: skip
            assert set(denied["policyTypes"]) == {"Ingress", "Egress"}
            admitted = {
                number
                for policy in policies
                if _selects(policy["spec"]["podSelector"], labels)
                for rule in policy["spec"].get("ingress", [])
                for port in rule["ports"]
                for number in range(port["port"], port.get("endPort", port["port"]) + 1)
            }
            opened = {
                port["containerPort"]
                for container in pod["containers"]
                for port in container.get("ports", [])
            }
            assert opened <= admitted


def _selects(selector: Document, labels: Document) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


def test_selectors_find_their_pods(releases: list[Release]) -> None:
    for release in releases:
        pods = [labels for labels, _ in release.pods()]
        for document in release.of_kind("Service", "PodDisruptionBudget", "PodMonitor"):
            selector = document["spec"]["selector"]
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= labels.items() for labels in pods)


def test_monitors_find_their_ports(releases: list[Release]) -> None:
    """A PodMonitor names ports of pods, a ServiceMonitor those of Services; no pod has both."""
    for release in releases:
        scraped = []
        for monitor in release.of_kind("PodMonitor", "ServiceMonitor"):
            selector = monitor["spec"]["selector"]["matchLabels"]
            if monitor["kind"] == "PodMonitor":
                endpoints = monitor["spec"]["podMetricsEndpoints"]
                found = [
                    pod for labels, pod in release.pods() if selector.items() <= labels.items()
                ]
                ports = [port for pod in found for each in pod["containers"] for port in
                         each.get("ports", [])]  # fmt: skip
            else:
                endpoints = monitor["spec"]["endpoints"]
                services = [each for each in release.of_kind("Service")
                            if selector.items() <= each["metadata"]["labels"].items()]  # fmt: skip
                (service,) = services
                ports = service["spec"]["ports"]
            names = [port["name"] for port in ports]
            assert endpoints and all(each["port"] in names for each in endpoints)
            scraped.append(tuple(selector.values()))
        assert len(scraped) == len(set(scraped))


@pytest.mark.timeout(300)  # some thousand command lines
def test_the_command_line_accepts_the_containers_arguments(
    releases: list[Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags, settings and environment variables exist, and their values are within bounds."""
    command_line = parser()  # building it takes longer than parsing
    for release in releases:
        for labels, container in containers(release):
            command = command_of(container)
            if command[0] != "baton":
                continue
            with monkeypatch.context() as patch:
                for variable in container.get("env", []):
                    if variable["name"].startswith("BATON_") and "__" in variable["name"]:
                        patch.setenv(variable["name"], variable.get("value", "a-key"))
                arguments = [
                    text.replace("$(POD_NAME)", "chat-prefill-0").replace("$(POD_IP)", "10.1.2.3")
                    for text in command[1:]
                ]
                options = command_line.parse_args(arguments)
                if container["name"] == "ray-certificate":  # it reads no settings
                    continue
                if labels.get("app.kubernetes.io/component") in ("router", "controller", *WORKERS):
                    config_of(options)


def command_of(container: Document) -> list[str]:
    """Return a container's command with its arguments, without the shell that picks a role."""
    whole = [*container.get("command", [""]), *container.get("args", [])]
    if container["name"] == "worker" and whole[0] == "sh":
        return ["baton", "worker", "--role=decode", *whole[4:]]
    return whole


def test_metrics_in_rules_exist(releases: list[Release]) -> None:
    known = set(re.findall(r"`(baton_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    known |= {f"{name}_{end}" for name in known for end in ("bucket", "sum", "count")}
    named = set()
    for release in releases:
        for rule in release.of_kind("PrometheusRule"):
            for group in rule["spec"]["groups"]:
                for each in group["rules"]:
                    named |= set(re.findall(r"baton_\w+", each["expr"]))
    assert named and named <= known
