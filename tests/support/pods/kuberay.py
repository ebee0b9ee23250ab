"""A stand-in for the KubeRay operator (1.7), as far as the chart uses it: pods of a RayCluster,
whose first container runs `ray start`, a Service for the head, Ray's token, workersToDelete.

Commands, environment, labels and the init container of workers are those that the operator adds.
Each group is a RayGroup (workloads.py). The state of the head goes to the Redis of
`gcsFaultToleranceOptions`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

Document = dict[str, Any]
GCS_PORT = 6379
RECONNECT_S = 600  # raylets wait so long for a head that is lost
SHELL = ["/bin/bash", "-c", "--"]
WITH_VALUES = ("include-dashboard", "log-color", "include-log-monitor")  # flags that say false too
WAIT = """SECONDS=0
while ! ray health-check --address {address} > /dev/null 2>&1; do
    echo "$SECONDS seconds elapsed: waiting for the GCS"
    sleep 5
done
"""


def operated(cluster: Document) -> list[Document]:
    """Return the groups and the Service of a RayCluster."""
    name, namespace = cluster["metadata"]["name"], cluster["metadata"]["namespace"]
    spec, service = cluster["spec"], f"{name}-head-svc"
    address = f"{service}.{namespace}.svc.cluster.local:{GCS_PORT}"
    made = [_head(cluster)]
    made += [_workers(cluster, group, address) for group in spec["workerGroupSpecs"]]
    selector = {"ray.io/cluster": name, "ray.io/node-type": "head"}
    entry = {"name": "gcs-server", "port": GCS_PORT, "targetPort": GCS_PORT}
    made.append({
        "kind": "Service",
        "metadata": {"name": service, "namespace": namespace},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [entry],
        },
    })  # fmt: skip
    return made


def token_secret(cluster: Document) -> str:
    """Return the name of the Secret in which the operator puts Ray's token (`auth_token`)."""
    if cluster["spec"]["authOptions"]["mode"] != "token":
        raise ValueError("this RayCluster has no token")
    return str(cluster["metadata"]["name"])


def patched(document: Document, operations: Sequence[Document]) -> Document:
    """Return an object with a JSON patch (RFC 6902) of `test` and `add` to members. Raises
    ValueError for a test that fails and for another operation, LookupError for a wrong path."""
    made = copy.deepcopy(document)
    for operation in operations:
        *path, last = operation["path"].lstrip("/").split("/")
        parent: Any = made
        for step in path:
            parent = parent[int(step)] if isinstance(parent, list) else parent[step]
        if operation["op"] == "test":
            if parent[last] != operation["value"]:
                raise ValueError(f"{operation['path']} is {parent[last]}")
        elif operation["op"] == "add" and isinstance(parent, dict):
            parent[last] = operation["value"]
        else:
            raise ValueError(f"{operation['op']} is not known here")
    return made


def _head(cluster: Document) -> Document:
    options = cluster["spec"]["gcsFaultToleranceOptions"]
    stored = [
        {"name": "RAY_external_storage_namespace", "value": cluster["metadata"]["name"]},
        {"name": "RAY_REDIS_ADDRESS", "value": options["redisAddress"]},
        {"name": "REDIS_PASSWORD", **options["redisPassword"]},
    ]
    group = cluster["spec"]["headGroupSpec"]
    flags = {
        **group["rayStartParams"],
        "redis-password": "$REDIS_PASSWORD",
        "dashboard-host": group["rayStartParams"].get("dashboard-host", "0.0.0.0"),
    }
    template = _template(cluster, group, "head", "headgroup")
    _start_ray(cluster, template, "--head", flags, f"127.0.0.1:{GCS_PORT}", stored)
    return _group(f"{cluster['metadata']['name']}-head", 1, template, [])


def _workers(cluster: Document, group: Document, address: str) -> Document:
    flags = {"address": address, **group["rayStartParams"]}
    template = _template(cluster, group, "worker", group["groupName"])
    patience = {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": str(RECONNECT_S)}
    first = copy.deepcopy(template["spec"]["containers"][0])
    waiting = {
        "name": "wait-gcs-ready",
        "image": first["image"],
        "command": SHELL,
        "args": [WAIT.format(address=address)],
        "env": [*first.get("env", ()), *_token(cluster)],
        "volumeMounts": first["volumeMounts"],
    }
    own = {each["name"] for each in first.get("env", ())}
    _start_ray(cluster, template, "", flags, address, [] if patience["name"] in own else [patience])
    template["spec"].setdefault("initContainers", []).append(waiting)
    named = group.get("scaleStrategy", {}).get("workersToDelete", [])
    name = f"{cluster['metadata']['name']}-{group['groupName']}-worker"
    return _group(name, int(group["replicas"]), template, named)


def _template(cluster: Document, group: Document, kind: str, name: str) -> Document:
    template: Document = copy.deepcopy(group["template"])
    template["metadata"]["labels"] |= {
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/node-type": kind,
        "ray.io/group": name,
    }
    return template


def _start_ray(
    cluster: Document,
    template: Document,
    mode: str,
    flags: dict[str, str],
    address: str,
    environment: list[Document],
) -> None:
    """Let a template's first container run `ray start`, in a shell that reads the parameters."""
    first = template["spec"]["containers"][0]
    if "command" in first or "args" in first:
        raise ValueError("the operator would put its command behind the container's own")
    resources = first["resources"]
    cpus = resources["limits"].get("cpu") or resources["requests"]["cpu"]
    own = {"num-cpus": str(cpus), "memory": str(_bytes(resources["limits"]["memory"]))}
    words = [f"ray start {mode}", *_flags(own | flags | {"block": "true"})]
    first["command"] = SHELL
    first["args"] = [f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {' '.join(words)}"]
    first["env"] = [
        *first.get("env", ()),
        *environment,
        {"name": "RAY_CLUSTER_NAME", "value": cluster["metadata"]["name"]},
        {"name": "RAY_PORT", "value": str(GCS_PORT)},
        {"name": "RAY_ADDRESS", "value": address},
        {"name": "RAY_USAGE_STATS_KUBERAY_IN_USE", "value": "1"},
        *_token(cluster),
    ]


def _flags(parameters: dict[str, str]) -> list[str]:
    made = []
    for name, value in sorted(parameters.items()):
        if name in WITH_VALUES or value not in ("true", "false"):
            made.append(f"--{name}={value}")
        elif value == "true":
            made.append(f"--{name}")
    return made


def _token(cluster: Document) -> list[Document]:
    reference = {"name": token_secret(cluster), "key": "auth_token"}
    return [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": reference}},
    ]


def _bytes(quantity: str) -> int:
    units = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return int(float(quantity[:-2]) * units[quantity[-2:]])


def _group(name: str, replicas: int, template: Document, named: list[str]) -> Document:
    return {
        "kind": "RayGroup",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "template": template, "workersToDelete": named},
    }
