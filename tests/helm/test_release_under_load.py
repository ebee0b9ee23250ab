"""A release under a steady load: its Redis is killed, a role grows and shrinks, every pod is
replaced, one is evicted, and no request fails or gets a wrong token. Tests follow each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pods.cluster import EvictionRefused, PodCluster
from tests.support.pods.images import local_images
from tests.support.pods.loaded_release import LoadedRelease, loaded_release
from tests.support.pods.network import network_unavailable

LACKING = network_unavailable()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(LACKING), reason=f"no pods here: {LACKING}"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedRelease]:
    folder = tmp_path_factory.mktemp("pods")
    with PodCluster(folder, local_images(folder)) as cluster:
        yield loaded_release(cluster, tmp_path_factory.mktemp("right"), {})


def test_a_killed_redis_pod_fails_no_request(site: LoadedRelease) -> None:
    before = site.addresses("redis", "router", "prefill", "decode")
    with site.load():
        site.cluster.delete("chat-baton-redis-0", grace_s=0)
        site.cluster.settle()
    kept = before & site.addresses("redis", "router", "prefill", "decode")
    assert len(kept) == len(before) - 1 and not kept & site.addresses("redis")


def test_a_role_grows_to_four_and_back(site: LoadedRelease) -> None:
    """What Redis held is lost by now: new workers are found by what others announced again."""
    before = site.addresses("router", "prefill", "decode")
    with site.load():
        for replicas in (4, 2):
            site.apply({"decode": {"replicas": replicas}})
            site.cluster.settle()
            assert len(site.cluster.pods("decode")) == replicas
            site.wait_for_links(replicas)
    assert before == site.addresses("router", "prefill", "decode")


def test_an_upgrade_pod_by_pod_fails_no_request(site: LoadedRelease) -> None:
    before = site.addresses("router", "prefill", "decode")
    with site.load():
        site.apply({
            "router": {"settings": {"router.max_requests": 200}},
            "workers": {"settings": {"step.max_sequences": 24}},
        })  # fmt: skip
        site.cluster.settle()
    after = site.addresses("router", "prefill", "decode")
    assert before.isdisjoint(after) and len(before) == len(after)


def test_an_evicted_pod_fails_no_request(site: LoadedRelease) -> None:
    evicted = site.cluster.pod("chat-baton-decode-0").address
    with site.load():
        site.cluster.evict("chat-baton-decode-0")
        with pytest.raises(EvictionRefused, match="1 of 2 pods are ready"):
            site.cluster.evict("chat-baton-decode-1")
        site.cluster.settle()
    assert evicted not in site.addresses("decode")


def test_no_container_outlived_its_grace_period(site: LoadedRelease) -> None:
    site.cluster.check()
    assert site.cluster.killed_late == []
