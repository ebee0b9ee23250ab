"""`kubectl` of a user whose cluster is a PodCluster. Each command reads the cluster's state or
changes it; what is not known here is refused, so that a document cannot ask for more unseen.

    create       secret tls
    get          secret, raycluster, pods, statefulset, jobs, events
    describe     pod
    logs         of a pod, of a job, of the pods with a label
    delete       pod, secret
    patch        secret, raycluster
    rollout      restart, status
    scale, exec, port-forward

`delete` does not wait until a pod is gone.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.pods.cluster import NAMESPACE, SETTLED_S, PodCluster
from tests.support.pods.manifests import object_of, restarted
from tests.support.pods.pod import Pod
from tests.support.pods.pod_views import described, event_rows, pod_rows, table
from tests.support.pods.scales import scaled

Answer = dict[str, Any]
EXEC_S = 120.0
TAIL = 10  # lines of each pod, where pods are chosen by a label
KINDS = {"deployment": "Deployment", "statefulset": "StatefulSet"}


class Kubectl:
    def __init__(self, cluster: PodCluster) -> None:
        self._cluster = cluster
        self._restarts = 0

    def answer(self, words: list[str]) -> Answer:
        """Return what a command prints, its exit code, and where a forwarded port leads. Raises
        ValueError for a command that is not known here."""
        line = ArgumentParser(prog="kubectl", exit_on_error=False)
        line.add_argument("-n", default=NAMESPACE)
        commands = line.add_subparsers(dest="command", required=True)
        for name, (run, arguments) in self._commands().items():
            command = commands.add_parser(name, exit_on_error=False)
            for each in arguments:
                command.add_argument(each, **_OPTIONS.get(each, {}))
            command.set_defaults(run=run)
        inner: list[str] = []
        if "--" in words:
            at = words.index("--")
            words, inner = words[:at], words[at + 1 :]
        given, unknown = line.parse_known_args(words)
        if unknown:
            raise ValueError(f"{' '.join(unknown)} is not known here")
        given.inner = inner
        made = given.run(given)
        return made if isinstance(made, dict) else {"text": made, "code": 0}

    def _commands(self) -> dict[str, tuple[Callable[[Namespace], str | Answer], Sequence[str]]]:
        return {
            "create": (self._create, ("kind", "type", "name", "--cert", "--key")),
            "get": (self._get, ("kind", "name", "-l", "-o")),
            "describe": (self._describe, ("kind", "name")),
            "logs": (self._logs, ("name", "-l", "-c", "--previous", "--prefix", "--tail")),
            "delete": (self._delete, ("kind", "name", "-l", "--wait")),
            "patch": (self._patch, ("kind", "name", "--type", "-p")),
            "rollout": (self._rollout, ("step", "target", "--timeout")),
            "scale": (self._scale, ("target", "--replicas")),
            "exec": (self._exec, ("target", "-c")),
            "port-forward": (self._forward, ("target", "port")),
        }

    def _create(self, given: Namespace) -> str:
        if (given.kind, given.type) != ("secret", "tls") or given.name in self._cluster.api.secrets:
            raise ValueError(f"create {given.kind} {given.type} {given.name} is not known here")
        files = {"tls.crt": given.cert, "tls.key": given.key}
        data = {name: Path(path).read_bytes() for name, path in files.items()}
        self._cluster.api.put(given.name, data)
        return f"secret/{given.name} created\n"

    def _get(self, given: Namespace) -> str:
        if given.kind == "secret" and given.o.startswith("jsonpath={.data."):
            key = given.o.removeprefix("jsonpath={.data.").removesuffix("}").replace("\\.", ".")
            return b64encode(self._cluster.api.data(given.name)[key]).decode()
        if given.o == "json":
            return json.dumps(self._objects(given))
        if given.o not in ("", "wide"):
            raise ValueError(f"-o {given.o} is not known here")
        rows = {
            "pods": lambda: pod_rows(self._labelled(given.l), wide=given.o == "wide"),
            "events": lambda: event_rows(self._cluster.events),
            "jobs": self._job_rows,
            "statefulset": self._set_rows,
        }
        if given.kind not in rows or given.name:
            raise ValueError(f"get {given.kind} {given.name} is not known here")
        return table(rows[given.kind]())

    def _objects(self, given: Namespace) -> Answer:
        if given.kind == "raycluster":
            return self._cluster.api.rayclusters.objects[given.name]
        if given.kind != "pods" or not given.l:
            raise ValueError(f"get {given.kind} {given.name} -o json is not known here")
        return {"kind": "List", "items": [object_of(each) for each in self._labelled(given.l)]}

    def _job_rows(self) -> list[Sequence[object]]:
        rows: list[Sequence[object]] = [("NAME", "STATUS", "COMPLETIONS")]
        for each in self._cluster.objects("Job"):
            name = each["metadata"]["name"]
            done = self._cluster.job_pod(name).code == 0
            rows.append((name, "Complete" if done else "Running", f"{int(done)}/1"))
        return rows

    def _set_rows(self) -> list[Sequence[object]]:
        rows: list[Sequence[object]] = [("NAME", "READY")]
        for each in self._cluster.objects("StatefulSet"):
            name = each["metadata"]["name"]
            ready = sum(pod.ready for pod in self._cluster.owned_by(name))
            rows.append((name, f"{ready}/{each['spec']['replicas']}"))
        return rows

    def _describe(self, given: Namespace) -> str:
        if given.kind != "pod":
            raise ValueError(f"describe {given.kind} is not known here")
        pod = self._cluster.pod(given.name)
        return described(pod, [each for each in self._cluster.events if each.pod == pod.name])

    def _logs(self, given: Namespace) -> str:
        if bool(given.l) == bool(given.name):
            raise ValueError("logs: give the name of a pod or job, or a label")
        pods = self._labelled(given.l) if given.l else [self._pod(given.name)]
        said = []
        for pod in pods:
            container = given.c or pod.spec["containers"][0]["name"]
            lines = pod.log_of(container, previous=given.previous).splitlines(keepends=True)
            tail = given.tail if given.tail is not None else TAIL if given.l else len(lines)
            before = f"[pod/{pod.name}/{container}] " if given.prefix else ""
            said += [before + each for each in lines[max(0, len(lines) - tail) :]]
        return "".join(said)

    def _delete(self, given: Namespace) -> str:
        if given.kind == "secret":
            del self._cluster.api.secrets[given.name]
            return f'secret "{given.name}" deleted\n'
        if given.kind != "pod":
            raise ValueError(f"delete {given.kind} is not known here")
        pods = self._labelled(given.l) if given.l else [self._cluster.pod(given.name)]
        for pod in pods:
            pod.delete()
        return "".join(f'pod "{pod.name}" deleted\n' for pod in pods)

    def _patch(self, given: Namespace) -> str:
        content = json.loads(given.p)
        if given.kind == "raycluster" and given.type == "json":
            self._cluster.api.rayclusters.patch(given.name, content)
            return f"raycluster.ray.io/{given.name} patched\n"
        if given.kind != "secret" or given.type or content.keys() != {"stringData"}:
            raise ValueError(f"patch {given.kind} with {sorted(content)} is not known here")
        data = {key: value.encode() for key, value in content["stringData"].items()}
        self._cluster.api.put(given.name, {**self._cluster.api.data(given.name), **data})
        return f"secret/{given.name} patched\n"

    def _rollout(self, given: Namespace) -> str:
        kind, _, name = given.target.partition("/")
        if given.step == "restart":
            self._restarts += 1
            mark = f"{time.strftime('%FT%TZ', time.gmtime())} {self._restarts}"
            self._cluster.change(KINDS[kind], name, lambda each: restarted(each, mark))
            return f"{kind}.apps/{name} restarted\n"
        if given.step != "status":
            raise ValueError(f"rollout {given.step} is not known here")
        within_s = float(given.timeout.removesuffix("s")) if given.timeout else SETTLED_S
        self._cluster.settle(only=name, within_s=within_s)
        return f'{kind} "{name}" successfully rolled out\n'

    def _scale(self, given: Namespace) -> str:
        kind, _, name = given.target.partition("/")
        if kind != "deployment":
            raise ValueError(f"scale {given.target} is not known here")
        replicas = int(given.replicas)
        self._cluster.change(KINDS[kind], name, lambda each: scaled(each, replicas))
        return f"{kind}.apps/{name} scaled\n"

    def _exec(self, given: Namespace) -> Answer:
        pod = self._pod(given.target)
        container = pod.container(given.c or pod.spec["containers"][0]["name"])
        done = container.run(given.inner, EXEC_S)
        return {"text": done.stdout + done.stderr, "code": done.returncode}

    def _forward(self, given: Namespace) -> Answer:
        """Tell to whose loopback the port leads: that of a pod, or of one behind a Service."""
        near, far = int(given.port), int(given.port)
        kind, _, name = given.target.rpartition("/")
        if kind == "service":
            pod = self._cluster.services.ready_pods(name)[0]
            far = self._cluster.services.port_of(pod, name, near)
        else:
            pod = self._pod(given.target)
        space = pod.site.prefix[-1]
        text = f"Forwarding from 127.0.0.1:{near} -> {far}\n"
        return {"text": text, "code": 0, "forward": [space, far], "listen": near}

    def _labelled(self, selector: str) -> list[Pod]:
        wanted = dict(each.split("=") for each in selector.split(",")) if selector else {}
        return [each for each in self._cluster.pods() if wanted.items() <= each.labels.items()]

    def _pod(self, named: str) -> Pod:
        """Return a pod by its name, the first one of deployment/NAME, or that of job/NAME."""
        kind, _, name = named.rpartition("/")
        if kind == "job":
            return self._cluster.job_pod(name)
        if kind == "deployment":
            return next(each for each in self._cluster.owned_by(name) if each.ready)
        if kind:
            raise ValueError(f"{named} is not known here")
        return self._cluster.pod(name)


_OPTIONS: dict[str, dict[str, Any]] = {
    "name": {"nargs": "?", "default": ""},
    "-l": {"default": ""},
    "-o": {"default": ""},
    "-c": {"default": ""},
    "--previous": {"action": "store_true"},
    "--prefix": {"action": "store_true"},
    "--tail": {"type": int},
    "--type": {"default": ""},
    "--timeout": {"default": ""},
    "--wait": {"choices": ["false"]},
}
