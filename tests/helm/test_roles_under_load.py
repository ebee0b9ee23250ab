"""`autoscaling.mode: baton` in the pods of a release, under load: prompts overload the only prefill
worker, the leading controller moves a decode worker, and no request fails or gets a wrong token."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos.answers import Answer
from chaos.asks import Ask, asks, long_asks, right_answers
from tests.support.chart import Values, example, merged, render
from tests.support.json_values import JsonObject
from tests.support.pods.cluster import PodCluster
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
SETTINGS = {"worker.deterministic": "true", "worker.dtype": "float32", "pool.blocks": 256}
RELEASE: Values = {
    "model": {"name": "small"},
    "router": {"replicas": 2, "leaveSeconds": 2},
    "workers": {"settings": SETTINGS},
    "decode": {"replicas": 3},
    "autoscaling": {"mode": "baton", "baton": {"ttftSeconds": 0.5}},
}
WORKERS = 4
ASKS, LONG_ASKS, SEED = 16, 40, 7
PER_S, LONG_PER_S = 0.5, 1.5  # more than one prefill worker computes; with more, routers refuse
MOVED_S = 180.0  # for the controller to move a worker, and for routers to link to it
AFTER_S = 8.0  # of load, once it is over


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Answer]:
    settings = tuple(f"{name}={value}" for name, value in SETTINGS.items())
    return right_answers(wanted(), settings, tmp_path_factory.mktemp("right"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    folder = tmp_path_factory.mktemp("pods")
    with PodCluster(folder, local_images(folder)) as made:
        made.apply(render(merged(example("cpu-demo"), RELEASE)), "pre-install")
        made.settle()
        yield made


def wanted() -> list[Ask]:
    return [*asks(ASKS, SEED), *long_asks(LONG_ASKS, SEED, ASKS)]


def events(cluster: PodCluster, event: str) -> list[JsonObject]:
    """Return the log lines of an event, of all controllers."""
    texts = [
        path.read_text()
        for pod in cluster.pods("controller")
        for path in Path(pod.site.folder).glob("*.log")
    ]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("{")]
    return [found for found in map(json.loads, lines) if found["event"] == event]


def linked(cluster: PodCluster) -> list[tuple[int, int]]:
    """Return to how many prefill and decode workers each router is linked."""
    return [(links(e, "prefill"), links(e, "decode")) for e in cluster.pods("router")]


def until_linked(cluster: PodCluster, prefill: int) -> None:
    """Wait until each router is linked to all workers, and to so many prefill workers or more."""

    def all_linked() -> bool:
        cluster.check()
        return all(e[0] >= prefill and sum(e) == WORKERS for e in linked(cluster))

    def found() -> str:
        return f"{linked(cluster)}\n{events(cluster, 'role step withheld')[-3:]}\n{cluster.logs()}"

    wait_until(all_linked, MOVED_S, every_s=0.5, show=found)


def test_a_worker_changes_its_role_and_no_request_fails(
    cluster: PodCluster, right: dict[int, Answer]
) -> None:
    until_linked(cluster, 1)
    before = {each.name: (each.address, each.restarts) for each in cluster.pods("worker")}
    moved = sum(map(completed_handoffs, cluster.pods("worker")))
    key = cluster.api.data("chat-baton-secrets")["api-keys"].decode()
    url = f"http://{service_address('chat-baton-router')}:8000"
    mixed, long = wanted()[:ASKS], wanted()[ASKS:]
    with ExitStack() as stack:
        loads = [
            stack.enter_context(Load(cluster.client(), url, key, each, right, per_s))
            for each, per_s in ((mixed, PER_S), (long, LONG_PER_S))
        ]
        until_linked(cluster, 2)
        time.sleep(AFTER_S)  # clients ask on: what fails, fails after the change too
    for load in loads:
        assert load.failures() == [], cluster.logs()
        print(f"{load.right()} of {len(load.traces)} right")
        assert load.right() == len(load.traces) > 0
    steps = events(cluster, "role step accepted")
    assert {(each["role"], each["worker_id"] in before) for each in steps} == {("prefill", True)}
    assert {e.name: (e.address, e.restarts) for e in cluster.pods("worker")} == before
    assert sum(map(completed_handoffs, cluster.pods("worker"))) > moved


def test_no_container_outlived_its_grace_period(cluster: PodCluster) -> None:
    cluster.check()
    assert cluster.killed_late == []
