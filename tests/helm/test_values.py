"""The chart's values: bad ones are refused by name, and each is described in schema and table."""

from __future__ import annotations

import json
from collections.abc import Iterator

import helm_python
import pytest
import yaml

from baton.runtime.settings.loading import given_names
from tests.support.chart import FOLDER, PLAIN, Values, example, merged, nested, render
from tests.support.chart_choices import MONITORED
from tests.support.chart_table import README, properties, renewed

DEMO = example("cpu-demo")
KUBERAY = {"orchestrator": "kuberay"}
CERTIFIED = ("router", "prefill", "decode", "redis")  # without Ray
BAD = {
    "model.embedded": (False, "model: 0 of model.embedded"),
    "model.path": ("x", "model: 2 of model.embedded"),
    "prefill.replicas": (0, "prefill.replicas is 0, but a model needs workers of both.*give a num"),
    "decode.tp": (3, "does not divide model.kvHeads 8"),
    "prefill.ep": (2, "prefill.ep is 2, but the 1 ranks of prefill.tp cannot form 2 equal groups"),
    "decode.gpu": ({"count": 1, "resource": ""}, "decode.gpu.count is 1 without"),
    "prefill.rdma": ({"count": 1}, "prefill.rdma.count is 1 without"),
    "prefill": ({"gpu": {"count": 1}, "settings": {"worker.device": "cuda"}}, None),
    "redis.enabled": (False, "redis.url is empty"),
    "redis.url": ("redis://elsewhere:6379/0", "redis.enabled and redis.url are both set"),
    "tls.mode": ("existing", "tls.existingSecrets.router is empty"),
    "tls.existingSecrets": ({"router": "x"}, "set tls.mode=existing"),
    "tls.issuer": ({"name": "x"}, "set tls.mode=certManager"),
    "ingress.enabled": (True, "ingress.host"),
    "httpRoute.enabled": (True, "httpRoute.parent.name"),
    "workers.adminPort": (9000, "give them different ports"),
    "router.grpcPort": (8000, "give them different ports"),
    "router.adminPort": (9402, "router.adminKeySecret is empty"),
    "router": ({"adminPort": 8001, "adminKeySecret": "k"}, "give them different ports"),
    "workers.kvPorts": ("9500-9400", "FIRST below LAST"),
    "workers.topologyLabels": (
        ["a", "b", "c", "d"],
        "workers.topologyLabels has 4 labels; give at most 3",
    ),
    "router.tlsSecret": ("Web", "router.tlsSecret is Web; give the name of an object: lower-case"),
    "router.settings": ({"router.drain_s": 5}, "remove it, and use router.drainSeconds"),
    "workers.settings": ({"worker.port": 1}, "which the chart sets itself"),
    "decode.settings": ({"worker.drain_s": 5}, "remove it, and use workers.drainSeconds"),
    "orchestrator": ("ray", "orchestrator is ray; give one of plain, kuberay"),
    "prefill.gpu": ({"resource": "amd.com/gpu"}, "amd.com/gpu, a device for which Baton has no"),
    "decode.gpu.resource": ("h200", "decode.gpu.resource is h200, which no device plugin offers"),
    "decode.gpu.count": (1, "decode.gpu.count is 1, but worker.device is cpu; set"),
    "router.resources": ({"requests": {"memory": "1025Mi"}}, "1025Mi, above the limit of 1Gi"),
    "prefill.resources": (
        {"limits": {"cpu": "900m"}},
        "prefill.resources.requests.cpu is 1, above the limit of 900m; lower it",
    ),
    "workers.sharedMemory": ("5Gi", "sharedMemory is 5Gi, above the 4Gi of prefill.resources"),
    "redis": ({"enabled": False, "url": "redis://r:6379/0"}, "secrets.existing is empty: the Sec"),
    "redis.plainText": (True, "plainText is set, but redis.url does not begin with redis://"),
    "model.tokenSecret": ("hub", "model.tokenSecret is hub, but nothing is downloaded"),
    "prefill.settings": ({"worker.host": "::"}, "prefill.settings has worker.host, which the"),
    "secrets.existing": ("mine", None),
    "kuberay.rayVersion": ("new", "rayVersion is new; give a version of three numbers"),
    "autoscaling.mode": ("baton", "ttftSeconds and itlSeconds are 0: the controller needs an obj"),
    "autoscaling.baton": ({"itlSeconds": 0.1}, "objective, but autoscaling.mode is none; set"),
    "monitoring.monitors": ("endpoints", "monitors is endpoints; give one of pods, services"),
    "autoscaling": ({"mode": "hpa"}, "monitoring.enabled is false; set monitoring.enabled=true"),
    "autoscaling.keda": ({"prometheus": "http://p"}, "autoscaling.mode is none; set"),
    "autoscaling.decode": ({"kvUsePercent": 0}, "kvUsePercent is 0; give a number from 1"),
    "decode.resources": ({"limits": {"memory": None}}, "limits.memory is not set; set it"),
    "router.port": (80, "router.port is 80, but the pods.*give a number from 1024"),
}


OWN_REDIS = {"redis": {"enabled": False, "url": "redis://r:6379/0"}, "secrets": {"existing": "m"}}
OWN_FILES = {"mode": "existing", "existingSecrets": {"router": "a", "prefill": "b", "decode": "c"}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (OWN_REDIS, "redis.url begins with redis://, which is plain text, but tls.mode is hook"),
        (merged(OWN_REDIS, {"redis": {"plainText": True}}), None),
        (merged(OWN_REDIS, {"tls": {"mode": "off"}}), None),
        ({"tls": OWN_FILES}, "tls.existingSecrets.redis is empty; name a Secret with tls.crt"),
        (merged({"tls": OWN_FILES}, {"tls": {"existingSecrets": {"redis": "d"}}}), None),
        (
            merged(
                OWN_REDIS,
                {"redis": {"plainText": True}},
                {"tls": {**OWN_FILES, "existingSecrets": dict.fromkeys(CERTIFIED, "a")}},
            ),
            "tls.existingSecrets.redis is set, but the release runs no Redis",
        ),
        (
            merged(OWN_REDIS, {"redis": {"plainText": True}, "tls": OWN_FILES}, KUBERAY),
            "tls.existingSecrets.redis is empty",  # Ray's state
        ),
        (
            merged({"tls": OWN_FILES}, {"tls": {"existingSecrets": {"redis": "d"}}}, KUBERAY),
            "tls.existingSecrets.ray is empty; name a Secret with tls.crt and tls.key of an author",
        ),
        (
            merged({"tls": OWN_FILES}, {"tls": {"existingSecrets": {"redis": "d", "ray": "e"}}}),
            "tls.existingSecrets.ray is set, but orchestrator is plain",
        ),
        (
            {"workers": {"settings": {"registry.authority": "/ca.crt"}}},
            "workers.settings has registry.authority, which the chart sets itself",
        ),
    ],
)
def test_tls_of_redis_is_as_the_values_say_or_refused(values: Values, words: str | None) -> None:
    if words is None:
        render(merged(DEMO, values))
        return
    with pytest.raises(helm_python.HelmError, match=words):
        render(merged(DEMO, values))


@pytest.mark.parametrize("path", BAD)
def test_a_bad_value_is_named(path: str) -> None:
    value, words = BAD[path]
    values = merged(DEMO, {"model": {"kvHeads": 8}}, nested(path, value))
    if words is None:
        render(values)
        return
    with pytest.raises(helm_python.HelmError, match=words):
        render(values)


GIVEN_WAY = {"worker.device"}  # by the chart's default, to a value in settings
FORMS: tuple[Values, ...] = (
    {"tls": {"mode": "off"}},
    {"monitoring": {"otlpEndpoint": "collector:4317"}},
    {"orchestrator": "kuberay"},
    {"router": {"tlsSecret": "web"}},
)


def settings_of(values: Values) -> frozenset[str]:
    """Return the settings that the chart itself gives to routers, workers and drivers of Ray."""
    found: frozenset[str] = frozenset()
    for labels, pod in render(values).pods():
        if labels.get("app.kubernetes.io/component") == "controller":
            continue  # no values of the chart are settings for it
        for container in pod["containers"]:
            variables = {each["name"]: "" for each in container.get("env", [])}
            arguments = (each.partition("=") for each in container.get("args", []))
            flags = {rest.partition("=")[0]: "" for name, _, rest in arguments if name == "--set"}
            found |= given_names(None, variables, flags)
    return found


def test_a_setting_that_the_chart_gives_is_refused() -> None:
    """In `settings` it would be overridden in silence, or contradict other values."""
    base = PLAIN
    given = {name: form for form in FORMS for name in settings_of(merged(base, form))}
    assert {"router.leave_s", "router.tls", "telemetry.otlp_endpoint"} <= set(given)
    for name in set(given) - GIVEN_WAY:
        section = "router" if name.startswith("router.") else "workers"
        words = f"{section}.settings has {name}, which the chart sets itself; remove it"
        with pytest.raises(helm_python.HelmError, match=words):
            render(merged(base, given[name], {section: {"settings": {name: 1}}}))


SCALED = {**MONITORED, "autoscaling": {"mode": "keda"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "autoscaling.keda.prometheus is empty; give the URL"),
        (
            {"keda": {"prometheus": "prometheus:9090"}},
            "keda.prometheus is prometheus:9090; give a URL",
        ),
        ({"keda": {"prometheus": "http://p", "authModes": "basic"}}, "belong together; name"),
        ({"keda": {"prometheus": "http://p", "authentication": "a"}}, "belong together; name"),
        (
            {"keda": {"prometheus": "http://p", "authModes": "any"}},
            "authModes is any; give bearer, basic",
        ),
        ({"mode": "hpa", "keda": {"prometheus": "http://p"}}, "mode is hpa; set autoscaling.mode"),
        ({"mode": "hpa", "decode": {"maxReplicas": 2}}, "maxReplicas is 2, below the 3 of decode"),
        (
            {"mode": "hpa, keda"},
            "autoscaling.mode is hpa, keda; give one of none, hpa, keda, baton",
        ),
    ],
)
def test_a_bad_autoscaler_is_named(change: Values, words: str) -> None:
    values = merged(DEMO, SCALED, {"decode": {"replicas": 3}}, {"autoscaling": change})
    with pytest.raises(helm_python.HelmError, match=words):
        render(values)


KEDA = {"mode": "keda", "keda": {"prometheus": "http://p"}}


@pytest.mark.parametrize("scaling", [{}, {"mode": "hpa"}, KEDA], ids=["none", "hpa", "keda"])
def test_metrics_that_no_peer_may_read_are_refused(scaling: Values) -> None:
    """Prometheus would see no worker, so no alert of one could fire and nothing could scale."""
    closed = merged(DEMO, {"monitoring": {"enabled": True}, "autoscaling": scaling})
    with pytest.raises(helm_python.HelmError) as refused:
        render(closed)
    mode = scaling.get("mode", "")
    for words in ("networkPolicy.monitoring is empty", "networkPolicy.enabled=false", mode):
        assert words in str(refused.value)
    render(merged(closed, {"networkPolicy": {"enabled": False}}))
    render(merged(closed, MONITORED))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefill": {"resources": {"limits": {"memory": "5Gi"}}}}, "prefill.resources and decode"),
        ({"decode": {"tp": 2}}, "prefill.tp and decode.tp differ; give both the same"),
        ({"decode": {"nodeSelector": {"gpu": "h200"}}}, "prefill.nodeSelector and decode.nodeSel"),
        (
            {
                "prefill": {"settings": {"step.max_sequences": 8}},
                "decode": {"settings": {"step.max_sequences": 9}},
            },
            "give step.max_sequences the values 8 and 9; give it once, in workers.settings",
        ),
        (
            {"orchestrator": "kuberay", "autoscaling": {"baton": {"maxWorkers": 3000}}},
            "maxWorkers is 3000, but orchestrator is kuberay, and `baton fleet` keeps at most 2048",
        ),
        (
            {"orchestrator": "kuberay", "decode": {"nodeSelector": {"gpu": "h200"}}},
            "prefill.nodeSelector and decode.nodeSelector differ; give both the same",
        ),
        ({"autoscaling": {"baton": {"maxWorkers": 1}}}, "maxWorkers is 1, below the 2 of prefill"),
        ({"autoscaling": {"baton": {"resources": {"requests": {"memory": "2Gi"}}}}},
         "autoscaling.baton.resources.requests.memory is 2Gi, above the limit of 1Gi"),
    ],
)  # fmt: skip
def test_workers_that_change_roles_must_be_alike(change: Values, words: str) -> None:
    changing = {"autoscaling": {"mode": "baton", "baton": {"ttftSeconds": 2}}}
    with pytest.raises(helm_python.HelmError, match=words):
        render(merged(DEMO, changing, change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workers": {"port": 6380}}, "6380 is a port of Ray; choose other workers.port"),
        ({"workers": {"kvPorts": "10000-10100"}}, "10002 is a port of Ray"),
        ({"workers": {"kvPorts": "10100-10200"}}, "kvPorts is 10100-10200, within the ports 10002"),
        ({"workers": {"adminPort": 10500}}, "10500 is one of the ports 10002 to 10999 of Ray"),
        (
            merged(SCALED, {"autoscaling": {"mode": "hpa"}}),
            "autoscaling.mode is hpa, but orchestrator is kuberay.*set autoscaling.mode=none or ba",
        ),
    ],
)
def test_a_bad_value_beside_kuberay_is_named(change: Values, words: str) -> None:
    with pytest.raises(helm_python.HelmError, match=words):
        render(merged(DEMO, {"orchestrator": "kuberay"}, change))


def test_each_rank_has_a_gpu_of_its_own() -> None:
    words = "prefill.tp is 2, but prefill.gpu.count is 1, and each rank needs.*gpu.count=2"
    with pytest.raises(helm_python.HelmError, match=words):
        render(merged(example("single-node-8gpu"), {"prefill": {"tp": 2}}))
    ranked = {"prefill": {"tp": 2, "gpu": {"count": 2}}}
    pool = render(merged(example("single-node-8gpu"), ranked)).named("StatefulSet", "prefill")
    (container,) = pool["spec"]["template"]["spec"]["containers"]
    assert "--set=worker.tp=2" in container["args"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2


@pytest.mark.parametrize(
    ("section", "lacking", "words"),
    [
        ("router", {"limits": {"memory": None}}, "limits.memory is not set; set it"),
        ("prefill", {"limits": None}, "limits.memory is not set; set it"),
        ("decode", {"requests": None}, "requests is empty; give cpu and memory"),
    ],
)
def test_resources_that_lack_a_value_are_named(section: str, lacking: Values, words: str) -> None:
    """A user takes a default away by null."""
    with pytest.raises(helm_python.HelmError, match=f"{section}.resources.{words}"):
        render(merged(example("production"), {section: {"resources": lacking}}))


def test_kv_ports_must_leave_the_workers_ports_free() -> None:
    with pytest.raises(helm_python.HelmError, match="contains the port 9000"):
        render(merged(DEMO, {"workers": {"kvPorts": "8900-9100"}}))


def test_notes_have_the_exact_request() -> None:
    notes = render(DEMO).notes
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in notes
    assert '"model": "baton-tiny"' in notes and "helm -n llm test chat" in notes
    assert "KV blocks travel between workers as plain text on ports 20000-20999" in notes
    assert "which networkPolicy admits between workers alone." in notes
    open_notes = render(merged(DEMO, {"networkPolicy": {"enabled": False}})).notes
    assert "admits" not in open_notes and "networkPolicy.enabled is false." in open_notes


def test_the_schema_describes_each_value() -> None:
    schema = json.loads((FOLDER / "values.schema.json").read_text())
    described = dict(properties(schema))
    assert all(inner["description"].endswith(".") for inner in described.values())

    def leaves(values: Values, path: str = "") -> Iterator[str]:
        for name, value in values.items():
            here = f"{path}.{name}".lstrip(".")
            yield here
            if isinstance(value, dict) and "properties" in described[here]:
                yield from leaves(value, here)

    assert set(leaves(yaml.safe_load((FOLDER / "values.yaml").read_text()))) <= set(described)


def test_the_table_of_values_is_generated() -> None:
    """README.md of the chart has one row for each value, from the schema."""
    text = README.read_text()
    assert text == renewed(text), "run `make chart`"
    with pytest.raises(ValueError, match="0 tables"):
        renewed("")


def test_the_console_stays_on_the_pods_loopback() -> None:
    asked = {"router": {"adminPort": 9402, "adminKeySecret": "operators"}}
    for release in (render(DEMO), render(merged(DEMO, asked))):
        (container,) = release.named("Deployment", "router")["spec"]["template"]["spec"][
            "containers"
        ]
        has = [each for each in container["args"] if each.startswith("--admin")]
        keys = [each for each in container["env"] if each["name"] == "BATON_ADMIN_KEY"]
        found = json.dumps([container["ports"], *release.of_kind("NetworkPolicy", "Service")])
        assert "9402" not in found
    assert has == ["--admin-port=9402"]  # on 127.0.0.1: `kubectl port-forward` reaches it
    assert keys[0]["valueFrom"]["secretKeyRef"] == {"name": "operators", "key": "admin-key"}


@pytest.mark.parametrize(
    ("form", "argument"),
    [
        ({}, "--set={}={}"),
        ({"autoscaling": {"mode": "baton", "baton": {"ttftSeconds": 2}}}, "--set={}={}"),
        ({"orchestrator": "kuberay"}, '"BATON_{}", "value": "{}"'),
    ],
    ids=["plain", "one group", "kuberay"],
)
def test_a_roles_zero_wins_over_the_value_of_all_workers(form: Values, argument: str) -> None:
    ratio, chunk = "telemetry.trace_ratio", "step.prefill_tokens"
    asked = {
        "workers": {"settings": {ratio: 0.5, chunk: 1024}},
        "decode": {"settings": {ratio: 0}},
    }
    if "orchestrator" in form:
        ratio, chunk = (name.replace(".", "__").upper() for name in (ratio, chunk))
    found = [
        json.dumps(pod)
        for labels, pod in render(merged(DEMO, asked, form)).pods()
        if labels.get("app.kubernetes.io/component") in ("decode", "worker")
    ]
    assert found
    for pod in found:
        assert argument.format(ratio, 0) in pod and argument.format(ratio, 0.5) not in pod
        assert argument.format(chunk, 1024) in pod


@pytest.mark.parametrize("orchestrator", ["plain", "kuberay"])
def test_large_numbers_are_written_in_digits(orchestrator: str) -> None:
    """`1.048576e+06`, as Go writes a float, is no whole number to a worker."""
    asked = {
        "orchestrator": orchestrator,
        "router": {"settings": {"router.max_body_bytes": 16777216}},
        "workers": {"settings": {"pool.blocks": 1048576, "telemetry.trace_ratio": 0.25}},
    }
    text = json.dumps(render(merged(DEMO, asked)).documents)
    for number in ("16777216", "1048576", "0.25"):
        assert f'={number}"' in text or f'"value": "{number}"' in text
    assert "e+0" not in text
