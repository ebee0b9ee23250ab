"""A cluster of one namespace on this machine: objects that are wanted, and the pods they make.

    apply ──▶ hooks, to their end ──▶ objects ──▶ a thread: controllers, Services, policies

`apply` takes a rendered release as `helm install` and `helm upgrade` do. The thread looks five
times a second, and when a pod says that it has changed. Owns all pods, and ends them.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.chart import Release
from tests.support.pods.container import ContainerSite, Image
from tests.support.pods.dns import NameServer
from tests.support.pods.kuberay import operated, token_secret
from tests.support.pods.manifests import (
    evictions_allowed,
    hook_weight,
    hooks_of,
    keyed,
    object_of,
    refuse_changes,
    with_restarts,
)
from tests.support.pods.network import Endpoint, PodNetwork, policy_rules, selects, service_rules
from tests.support.pods.pod import Event, Pod, PodParts
from tests.support.pods.scales import scaled
from tests.support.pods.secrets_server import SecretsServer
from tests.support.pods.services import Services
from tests.support.pods.volumes import account_mounts, refresh_secret, volumes_of
from tests.support.pods.workloads import (
    KINDS,
    Actions,
    PodState,
    next_actions,
    revision_of,
    settled,
)
from tests.support.waiting import wait_until

Document = dict[str, Any]
CONTROL_S = 0.2
SETTLED_S = 600.0
HOOK_S = 300.0
KILLED_S = 30.0
NAMESPACE = "llm"
API_PORT = 6443  # one that the chart's policies know
ZONE = "svc.cluster.local"


class EvictionRefused(Exception):
    """A PodDisruptionBudget does not allow it now."""


class PodCluster:
    """`images` gives what an image's name stands for. A context manager; `folder` keeps logs."""

    def __init__(self, folder: Path, images: Callable[[str], Image]) -> None:
        self.folder = folder
        self._images = images
        self._stack = ExitStack()
        self._lock = threading.RLock()
        self._look = threading.Event()
        self._closing = threading.Event()
        self._wanted: dict[tuple[str, str], Document] = {}
        self._pods: dict[str, Pod] = {}
        self._revisions: dict[str, str] = {}
        self._job_pods: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._clients: list[str] = []
        self.services = Services(lambda: self.objects("Service"), self.pods, f"{NAMESPACE}.{ZONE}")
        self.events: list[Event] = []
        self.killed_late: list[str] = []  # containers that outlived their grace period
        self._made = self._hooks = 0
        self._error: BaseException | None = None

    def __enter__(self) -> PodCluster:
        with ExitStack() as stack:
            self.network = stack.enter_context(PodNetwork())
            self.api = SecretsServer(self.network.node, NAMESPACE, self.folder / "api", API_PORT)
            self.api.scales.changed = self._rescale
            self.api.changed = self._remount
            self.api.rayclusters.changed = self._regroup
            self.api.rayclusters.pods = lambda: [object_of(each) for each in self.pods()]
            stack.callback(self.api.close)
            stack.callback(NameServer(self.network.node, self.services.lookup).close)
            stack.callback(self._end_all)
            self._thread = threading.Thread(target=self._keep, name="controllers", daemon=True)
            self._thread.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def apply(self, release: Release, hook: str) -> None:
        """Install or upgrade a release (`hook`: pre-install or pre-upgrade), with its hooks
        before. Raises RuntimeError for a hook that fails, ValueError for an immutable field."""
        hooks = [each for each in release.documents if hook in hooks_of(each)]
        self._grant(release.documents)
        with self._lock:  # until the release's own objects take their place
            self._wanted |= keyed(e for e in hooks if e["kind"] == "NetworkPolicy")
        for job in sorted((e for e in hooks if e["kind"] == "Job"), key=hook_weight):
            self.run_once(job["metadata"]["name"], job["spec"]["template"])
        documents = [each for each in release.documents if not hooks_of(each)]
        for cluster in release.of_kind("RayCluster"):
            self.api.rayclusters.put(cluster)
            documents += operated(cluster)
            name = token_secret(cluster)
            if name not in self.api.secrets:
                self.api.put(name, {"auth_token": secrets.token_urlsafe(32).encode()})
        with self._lock:
            made = keyed(documents)
            for key, each in made.items():
                refuse_changes(self._wanted.get(key), each)
            self._wanted = {
                key: with_restarts(self._wanted.get(key), self.api.scales.applied(each))
                for key, each in made.items()
            }
        self._look.set()

    def change(self, kind: str, name: str, changed: Callable[[Document], Document]) -> None:
        """Put what `changed` returns in an object's place. Raises KeyError."""
        with self._lock:
            self._wanted[kind, name] = changed(self._wanted[kind, name])
        self._look.set()

    def _rescale(self, name: str, replicas: int) -> None:
        self.change("StatefulSet", name, lambda each: scaled(each, replicas))

    def _remount(self, secret: str) -> None:
        """Write a changed Secret into the pods that mount it, as kubelets do."""
        for each in self.pods():
            refresh_secret(each.spec, each.site, secret, self.api)

    def _regroup(self, cluster: Document) -> None:
        with self._lock:
            for each in (cluster, *operated(cluster)):
                self._wanted[each["kind"], each["metadata"]["name"]] = each
        self._look.set()

    def run_once(self, name: str, template: Document) -> str:
        """Run a pod to its end, and return what it printed. Raises RuntimeError if it failed."""
        self._hooks += 1
        pod = self._start(f"{name}-{self._hooks}", template)
        pod.join(HOOK_S)
        with self._lock:
            del self._pods[pod.name]
        if pod.code != 0:
            raise RuntimeError(f"{name} ended with {pod.code}\n{pod.logs()}")
        return pod.logs()

    def run_test(self, release: Release) -> str:
        """Run the release's test pods as `helm test` does; what they printed."""
        said = [
            self.run_once(each["metadata"]["name"], each)
            for each in release.of_kind("Pod")
            if "test" in hooks_of(each)
        ]
        return "\n".join(said)

    def client(self) -> str:
        """Make a network namespace beside the pods' ones, which no policy is for: its name."""
        with self._lock:
            host = f"c{len(self._clients)}"
            prefix, _ = self.network.add(host)
            self._clients.append(host)  # from now on the thread loads rules into it
        self._look.set()
        return prefix[-1]

    def settle(self, only: str = "", within_s: float = SETTLED_S) -> None:
        """Wait until exactly the wanted pods, of all controllers or of one, are there and
        ready."""

        def settled() -> bool:
            self.check()
            return self._settled(only)

        def found() -> str:
            return f"{self.states()}\n{self.logs()}"

        wait_until(settled, within_s, every_s=0.1, show=found, error=TimeoutError)

    def delete(self, name: str, grace_s: float | None = None) -> None:
        """Delete a pod; its controller makes another. A grace of 0 kills it."""
        self.pod(name).delete(grace_s)

    def evict(self, name: str) -> None:
        """Delete a pod as a node's drain does. Raises EvictionRefused."""
        pod = self.pod(name)
        for budget in self.objects("PodDisruptionBudget"):
            selector = budget["spec"]["selector"]
            if not selects(selector, pod.labels):
                continue
            wanted = sum(
                int(each["spec"]["replicas"])
                for each in self._controllers()
                if selects(selector, each["spec"]["template"]["metadata"]["labels"])
            )
            ready = sum(each.ready for each in self.pods() if selects(selector, each.labels))
            if evictions_allowed(budget, wanted, ready) <= 0:
                raise EvictionRefused(f"{name}: {ready} of {wanted} pods are ready")
        pod.delete()

    def pod(self, name: str) -> Pod:
        with self._lock:
            return self._pods[name]

    def pods(self, component: str = "") -> list[Pod]:
        with self._lock:
            found = list(self._pods.values())
        label = "app.kubernetes.io/component"
        return [each for each in found if component in ("", each.labels.get(label))]

    def owned_by(self, owner: str) -> list[Pod]:
        """Return the pods that a controller has made."""
        return [pod for pod, _ in self._owned(owner)]

    def states(self) -> str:
        return "; ".join(
            f"{each.name} {each.address} "
            f"{'ends' if each.terminating else 'ready' if each.ready else 'not ready'}"
            for each in self.pods()
        )

    def logs(self) -> str:
        return "\n".join(each.logs() for each in self.pods())

    def check(self) -> None:
        """Raise what a thread of the cluster has raised."""
        for error in (self._error, *(each.error for each in self.pods())):
            if error is not None:
                raise error

    def objects(self, kind: str) -> list[Document]:
        with self._lock:
            return [each for (found, _), each in self._wanted.items() if found == kind]

    def _controllers(self) -> list[Document]:
        return [each for kind in KINDS for each in self.objects(kind)]

    def _grant(self, documents: list[Document]) -> None:
        rules = {e["metadata"]["name"]: e["rules"] for e in documents if e["kind"] == "Role"}
        for binding in (each for each in documents if each["kind"] == "RoleBinding"):
            for subject in binding["subjects"]:
                self.api.roles[subject["name"]] = rules[binding["roleRef"]["name"]]

    def _keep(self) -> None:
        try:
            while not self._closing.is_set():
                self._look.wait(CONTROL_S)
                self._look.clear()
                self._clear_ended()
                for document in self._controllers():
                    self._control(document)
                for document in self.objects("Job"):
                    self._control_job(document)
                self._end_unwanted()
                self._wire()
        except BaseException as error:  # `check` raises it in the test's thread
            self._error = error

    def _control(self, document: Document) -> None:
        name, template = document["metadata"]["name"], document["spec"]["template"]
        actions = next_actions(document, self._states(name), self._made)
        self._act(name, template, revision_of(template), actions)

    def _control_job(self, document: Document) -> None:
        name = document["metadata"]["name"]
        if name not in self._job_pods:
            self._job_pods[name] = f"{name}-{self._made}"
            self._start(self._job_pods[name], document["spec"]["template"])

    def job_pod(self, name: str) -> Pod:
        """Return the pod of a Job."""
        return self.pod(self._job_pods[name])

    def _act(self, owner: str, template: Document, revision: str, actions: Actions) -> None:
        for number in actions.make:
            name = f"{owner}-{number}"
            self._revisions[name] = revision
            self._start(name, template)
        for name in actions.end:
            self.pod(name).delete()

    def _states(self, owner: str) -> list[PodState]:
        return [
            PodState(each.name, self._revisions[each.name], each.ready, each.terminating, number)
            for each, number in self._owned(owner)
        ]

    def _owned(self, owner: str) -> Iterator[tuple[Pod, int]]:
        for each in self.pods():
            before, _, number = each.name.rpartition("-")
            if before == owner and each.name in self._revisions:
                yield each, int(number)

    def _end_unwanted(self) -> None:
        owners = {each["metadata"]["name"] for each in self._controllers()}
        for each in self.pods():
            if each.name in self._revisions and each.name.rpartition("-")[0] not in owners:
                each.delete()
        jobs = {each["metadata"]["name"] for each in self.objects("Job")}
        for name in self._job_pods.keys() - jobs:
            self.pod(self._job_pods.pop(name)).delete()

    def _settled(self, only: str) -> bool:
        wanted = [each for each in self._controllers() if only in ("", each["metadata"]["name"])]
        return bool(wanted) and all(
            settled(each, self._states(each["metadata"]["name"])) for each in wanted
        )

    def _start(self, name: str, template: Document) -> Pod:
        with self._lock:
            self._made += 1
            host = f"p{self._made}"
        prefix, address = self.network.add(host)
        spec, labels = template["spec"], template["metadata"]["labels"]
        folder = self.folder / f"{host}-{name}"
        folder.mkdir()
        site = ContainerSite(
            prefix, folder, name, spec["securityContext"]["runAsUser"],
            spec["securityContext"]["runAsGroup"], self.network.node, f"{NAMESPACE}.{ZONE} {ZONE}",
        )  # fmt: skip
        with self._lock:
            maps = {key: e for (kind, key), e in self._wanted.items() if kind == "ConfigMap"}
        volumes = volumes_of(spec, site, self.folder, self.api, maps)
        parts = PodParts(
            self._image, volumes, account_mounts(spec, site, self.api), self._value_of,
            self._look.set, self.events.append,
        )  # fmt: skip
        self._load(host, Endpoint(name, address, labels, False))  # before anything runs in it
        pod = Pod(name, address, template, site, parts)
        with self._lock:
            self._pods[name], self._hosts[name] = pod, host
        self._look.set()
        return pod

    def _image(self, name: str) -> Image:
        image = self._images(name)
        api = {
            "KUBERNETES_SERVICE_HOST": self.api.address,
            "KUBERNETES_SERVICE_PORT": str(self.api.port),
        }
        return Image(image.mounts, {**image.environment, **api})

    def _value_of(self, source: Document) -> str | None:
        """Return what an environment variable gets from a Secret. Raises KeyError for one that is
        not there and not optional."""
        reference = source["secretKeyRef"]
        try:
            return self.api.data(reference["name"])[reference["key"]].decode()
        except KeyError:
            if reference.get("optional"):
                return None
            raise

    def _clear_ended(self) -> None:
        for each in self.pods():
            if each.over and each.terminating and each.error is None:
                self.killed_late += [f"{each.name} {late}" for late in each.killed_late]
                with self._lock:
                    del self._pods[each.name]
                    self._revisions.pop(each.name, None)
                self.network.forget(self._hosts.pop(each.name))

    def _wire(self) -> None:
        """Give every pod the rules of Services and policies as they are now."""
        services = service_rules(self.services.targets())
        for host in list(self._clients):
            self.network.load(host, services, "services")
        for pod in self.pods():
            own = self._hosts.get(pod.name)
            if own is not None and not pod.over:
                self.network.load(own, services, "services")
                self._load(own, self._endpoint(pod))

    def _load(self, host: str, endpoint: Endpoint) -> None:
        others = [self._endpoint(each) for each in self.pods()]
        policies = self.objects("NetworkPolicy")
        rules = policy_rules(endpoint, policies, others, self.network.node)
        self.network.load(host, rules, "policy")

    def _endpoint(self, pod: Pod) -> Endpoint:
        return Endpoint(pod.name, pod.address, pod.labels, pod.ready)

    def _end_all(self) -> None:
        self._closing.set()
        self._look.set()
        self._thread.join()
        for each in self.pods():
            each.delete(0)
        for each in self.pods():
            each.join(KILLED_S)
