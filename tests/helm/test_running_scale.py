"""A release whose controller asks for more and fewer workers, as pods in namespaces: from one pod
to the least, to the most under load, and back. No request fails or gets a wrong token. Tests follow
each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

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
    pytest.mark.timeout(900),
]
WORKERS = "chat-baton-worker"
SETTINGS = {"worker.deterministic": "true", "worker.dtype": "float32", "pool.blocks": 256}
LEAST, MOST = 2, 3
RELEASE: Values = {
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
FULL_LOAD = 8  # answers while all workers are ready
WITHIN_S = 240.0


@dataclass(slots=True)
class Site:
    cluster: PodCluster
    clients: str

    def asked(self) -> int:
        return self.cluster.api.scales.replicas[WORKERS]

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
        yield made


def test_the_first_pod_gets_the_others_of_the_least(site: Site) -> None:
    site.wait(lambda: site.asked() == LEAST, "the least is not asked for")
    site.cluster.settle()
    assert len(site.cluster.pods("worker")) == LEAST


def test_load_brings_the_most_and_calm_the_least(
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
        site.wait(lambda: site.asked() == MOST, "the most is not asked for")
        site.wait(lambda: len(ready(site)) == MOST, "the new worker is not ready")
        before = answered(loads)
        site.wait(lambda: answered(loads) >= before + FULL_LOAD, "no answers with all workers")
    failures = [failure for load in loads for failure in load.failures()]
    assert failures == [], site.cluster.logs()[-8000:]
    site.wait(lambda: site.asked() == LEAST, "no worker leaves")
    site.cluster.settle()
    assert sorted(ready(site)) == [f"{WORKERS}-{number}" for number in range(LEAST)]
    (leaves,) = site.events("worker drain ordered")
    assert leaves["worker"] == f"{WORKERS}-{MOST - 1}"
    assert site.cluster.api.refused == []


def test_a_number_that_is_refused_is_asked_again(site: Site) -> None:
    """A user asks for one more; the controller may not take it away at first."""
    scales = site.cluster.api.scales
    scales.refuses = 503
    scales.put(WORKERS, MOST)
    scales.changed(WORKERS, MOST)
    site.cluster.settle()
    site.wait(lambda: refused(site), "it has not been refused")
    assert site.asked() == MOST
    scales.refuses = 0
    site.wait(lambda: site.asked() == LEAST, "it is not asked again")
    site.cluster.settle()


def test_a_successor_goes_on_with_what_the_leader_has_left(site: Site) -> None:
    before = {each.name for each in site.cluster.pods("controller")}
    for name in before:
        site.cluster.delete(name, grace_s=0)
    site.cluster.settle("chat-baton-controller")
    site.wait(lambda: site.events("controller memory recalled") != [], "no memory is recalled")
    site.wait(lambda: site.events("size step withheld") != [], "its leader decides nothing")
    assert site.asked() == LEAST


def answered(loads: list[Load]) -> int:
    return sum(load.right() for load in loads)


def refused(site: Site) -> bool:
    """Whether the API has refused a number; a leader logs the same event while its term is new."""
    return any("with 503" in each["reason"] for each in site.events("workers not asked for"))


def ready(site: Site) -> list[str]:
    return [each.name for each in site.cluster.pods("worker") if each.ready]
