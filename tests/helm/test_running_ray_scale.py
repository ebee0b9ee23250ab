"""A RayCluster whose controller asks for more and fewer pods, as pods in namespaces: one more under
load, and back, while the driver of `baton fleet` follows. No request fails or gets a wrong token.
Tests follow each other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from baton.deploy.host.raycluster import PodGroup, worker_group
from baton.planner.control.leadership import TERM_S
from chaos.asks import asks, long_asks, right_answers
from tests.support.chart import Values, example, merged, render
from tests.support.json_values import JsonObject
from tests.support.pods.cluster import PodCluster
from tests.support.pods.images import local_images
from tests.support.pods.load import Load
from tests.support.pods.manifests import service_address
from tests.support.pods.network import network_unavailable
from tests.support.waiting import wait_until

LACKING = network_unavailable()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(LACKING), reason=f"no pods here: {LACKING}"),
    pytest.mark.timeout(1200),
]
RAYCLUSTER = "chat-baton-ray"
SETTINGS = {"worker.deterministic": "true", "worker.dtype": "float32", "pool.blocks": 256}
LEAST, MOST = 2, 3  # pods of both roles
RELEASE: Values = {
    "orchestrator": "kuberay",
    "model": {"name": "small"},
    "router": {"replicas": 1, "settings": {"router.placement": "disaggregated"}},
    "workers": {"settings": SETTINGS},
    "autoscaling": {
        "mode": "baton",
        "scaleDownSeconds": 20,
        "baton": {"ttftSeconds": 1.0, "maxWorkers": MOST},
    },
}
ASKS, LONG_ASKS, SEED = 40, 20, 5
PER_S, LONG_PER_S = 0.5, 1.2  # for one prefill worker too much to meet the objective
WITHIN_S = 300.0


@dataclass(slots=True)
class Site:
    cluster: PodCluster
    clients: str

    def group(self) -> PodGroup:
        return worker_group(self.cluster.api.rayclusters.objects[RAYCLUSTER], "worker")

    def asked(self) -> int:
        return self.group().replicas

    def ready(self) -> list[str]:
        return [each.name for each in self.cluster.pods("worker") if each.ready]

    def wait(self, happens: Callable[[], bool], what: str) -> None:
        def happens_without_errors() -> bool:
            self.cluster.check()
            return happens()

        def found() -> str:
            return f"{what}\n{self.cluster.logs()[-8000:]}"

        wait_until(happens_without_errors, WITHIN_S, every_s=0.5, show=found)

    def events(self, event: str) -> list[JsonObject]:
        """Return the controllers' log lines of an event."""
        text = "\n".join(each.logs() for each in self.cluster.pods("controller"))
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return [each for each in found if each.get("event") == event]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pods")
    with PodCluster(folder, local_images(folder)) as cluster:
        made = Site(cluster, cluster.client())
        cluster.apply(render(merged(example("cpu-demo"), RELEASE)), "pre-install")
        cluster.settle()
        yield made


def test_load_brings_a_pod_and_calm_takes_one(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = tuple(f"{name}={value}" for name, value in SETTINGS.items())
    mixed, long = asks(ASKS, SEED), long_asks(LONG_ASKS, SEED, ASKS)
    right = right_answers([*mixed, *long], settings, tmp_path_factory.mktemp("right"))
    key = site.cluster.api.data("chat-baton-secrets")["api-keys"].decode()
    url = f"http://{service_address('chat-baton-router')}:8000"
    with ExitStack() as stack:
        loads = [
            stack.enter_context(Load(site.clients, url, key, each, right, per_s))
            for each, per_s in ((mixed, PER_S), (long, LONG_PER_S))
        ]
        site.wait(lambda: site.asked() == MOST, "one more is not asked for")
        site.wait(lambda: len(site.ready()) == MOST, "its worker is not ready")
        time.sleep(5.0)  # clients ask all workers, the new one too
    failures = [failure for load in loads for failure in load.failures()]
    assert failures == [], site.cluster.logs()[-8000:]
    before = site.ready()
    site.wait(lambda: site.asked() == LEAST, "no worker leaves")
    site.cluster.settle()
    (named,) = site.group().named
    assert {*site.ready(), named} == {*before} and named not in site.ready()
    (leaves,) = site.events("worker drain ordered")
    assert leaves["worker"] == "decode-1"
    assert site.cluster.api.refused == []


def test_a_patch_that_is_refused_is_asked_again(site: Site) -> None:
    """A user asks for one pod more; the controller may not take it away at first."""
    stored = site.cluster.api.rayclusters
    stored.refuses = 503
    number = {"op": "add", "path": f"{site.group().path}/replicas", "value": MOST}
    stored.patch(RAYCLUSTER, [number])
    site.cluster.settle()
    site.wait(lambda: bool(site.events("workers not asked for")), "it has not been refused")
    assert site.asked() == MOST
    stored.refuses = 0
    site.wait(lambda: site.asked() == LEAST, "it is not asked again")
    site.cluster.settle()


def test_a_successor_leaves_the_number(site: Site) -> None:
    for name in [each.name for each in site.cluster.pods("controller")]:
        site.cluster.delete(name, grace_s=0)
    site.cluster.settle("chat-baton-controller")
    time.sleep(2 * TERM_S)  # nothing tells when the key of the killed controller expires
    assert site.events("controller memory recalled") and site.asked() == LEAST
    site.cluster.check()
    assert site.cluster.killed_late == []
