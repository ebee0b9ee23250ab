"""A release under a steady load: its Redis is killed, a role grows and shrinks, every pod is
replaced, one is evicted, and no request fails or gets a wrong token. Tests follow each other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from chaos.answers import Answer
from chaos.asks import Ask, asks, right_answers
from tests.support.chart import Values, example, merged, render
from tests.support.pods.cluster import EvictionRefused, PodCluster
from tests.support.pods.images import local_images
from tests.support.pods.load import Load, completed_handoffs, links
from tests.support.pods.manifests import service_address
from tests.support.pods.network import network_unavailable
from tests.support.waiting import wait_until

LACKING = network_unavailable()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(LACKING), reason=f"no pods here: {LACKING}"),
    pytest.mark.timeout(900),
]
# No batch changes an answer; pools hold fewer prompts than there are, so that KV keeps moving.
SETTINGS = {"worker.deterministic": "true", "worker.dtype": "float32", "pool.blocks": 160}
RELEASE: Values = {
    "model": {"name": "small"},
    "router": {"replicas": 2, "leaveSeconds": 2},
    "workers": {"settings": SETTINGS},
    "decode": {"replicas": 2},
}
PER_S = 1.5
ASKS, SEED = 40, 5
BEFORE_S = 2.0  # of load, before anything happens
AFTER_S = 3.0  # of load, once it is over
LINKED_S = 30.0  # for routers to link to workers that are ready


@dataclass(slots=True)
class Site:
    """A release, and clients in a network of their own that know the right answers."""

    cluster: PodCluster
    clients: str
    values: Values
    asks: list[Ask]
    right: Mapping[int, Answer]

    def apply(self, values: Values, hook: str = "pre-upgrade") -> None:
        self.values = merged(self.values, values)
        self.cluster.apply(render(self.values), hook)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Load the release; at the end no request has failed or has a wrong token, and KV has
        moved to decode workers that are still there."""
        before = self.handoffs()
        key = self.cluster.api.data("chat-baton-secrets")["api-keys"].decode()
        url = f"http://{service_address('chat-baton-router')}:8000"
        with Load(self.clients, url, key, self.asks, self.right, PER_S) as load:
            time.sleep(BEFORE_S)  # clients ask before anything changes
            yield
            time.sleep(AFTER_S)  # clients ask on: what fails, fails after the change too
        sent = len(load.traces) % ASKS
        self.asks = self.asks[sent:] + self.asks[:sent]  # the next load goes on from here
        assert load.failures() == [], self.cluster.logs()
        moved = {name: count - before.get(name, 0) for name, count in self.handoffs().items()}
        print(f"{load.right()} of {len(load.traces)} right; handoffs by decode worker: {moved}")
        assert load.right() >= PER_S * (BEFORE_S + AFTER_S) and sum(moved.values()) > 0

    def handoffs(self) -> dict[str, int]:
        """Return the completed handoffs of each decode worker, by address."""
        return {each.address: completed_handoffs(each) for each in self.cluster.pods("decode")}

    def wait_for_links(self, count: int) -> None:
        """Wait until each router is linked to so many decode workers."""

        def linked() -> list[int]:
            return [links(each, "decode") for each in self.cluster.pods("router")]

        wait_until(lambda: {*linked()} == {count}, LINKED_S, every_s=0.5, show=linked)

    def addresses(self, *components: str) -> set[str]:
        return {each.address for name in components for each in self.cluster.pods(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    settings = tuple(f"{name}={value}" for name, value in SETTINGS.items())
    wanted = asks(ASKS, SEED)
    right = right_answers(wanted, settings, tmp_path_factory.mktemp("right"))
    folder = tmp_path_factory.mktemp("pods")
    with PodCluster(folder, local_images(folder)) as cluster:
        made = Site(cluster, cluster.client(), merged(example("cpu-demo"), RELEASE), wanted, right)
        made.apply({}, "pre-install")
        cluster.settle()
        yield made


def test_a_killed_redis_pod_fails_no_request(site: Site) -> None:
    before = site.addresses("redis", "router", "prefill", "decode")
    with site.load():
        site.cluster.delete("chat-baton-redis-0", grace_s=0)
        site.cluster.settle()
    kept = before & site.addresses("redis", "router", "prefill", "decode")
    assert len(kept) == len(before) - 1 and not kept & site.addresses("redis")


def test_a_role_grows_to_four_and_back(site: Site) -> None:
    """What Redis held is lost by now: new workers are found by what others announced again."""
    before = site.addresses("router", "prefill", "decode")
    with site.load():
        for replicas in (4, 2):
            site.apply({"decode": {"replicas": replicas}})
            site.cluster.settle()
            assert len(site.cluster.pods("decode")) == replicas
            site.wait_for_links(replicas)
    assert before == site.addresses("router", "prefill", "decode")


def test_an_upgrade_pod_by_pod_fails_no_request(site: Site) -> None:
    before = site.addresses("router", "prefill", "decode")
    with site.load():
        site.apply({
            "router": {"settings": {"router.max_requests": 200}},
            "workers": {"settings": {"step.max_sequences": 24}},
        })  # fmt: skip
        site.cluster.settle()
    after = site.addresses("router", "prefill", "decode")
    assert before.isdisjoint(after) and len(before) == len(after)


def test_an_evicted_pod_fails_no_request(site: Site) -> None:
    evicted = site.cluster.pod("chat-baton-decode-0").address
    with site.load():
        site.cluster.evict("chat-baton-decode-0")
        with pytest.raises(EvictionRefused, match="1 of 2 pods are ready"):
            site.cluster.evict("chat-baton-decode-1")
        site.cluster.settle()
    assert evicted not in site.addresses("decode")


def test_no_container_outlived_its_grace_period(site: Site) -> None:
    site.cluster.check()
    assert site.cluster.killed_late == []
