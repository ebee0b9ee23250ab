"""A release in pods, and clients of it that know the right answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chaos.answers import Answer
from chaos.asks import Ask, asks, right_answers
from tests.support.chart import Values, example, merged, render
from tests.support.pods.cluster import PodCluster
from tests.support.pods.load import Load, completed_handoffs, links
from tests.support.pods.manifests import service_address
from tests.support.waiting import wait_until

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


def loaded_release(cluster: PodCluster, right: Path, values: Values) -> LoadedRelease:
    """Install the CPU demo with RELEASE and these values, and wait until it is ready. `right`: a
    folder for the process that computes the right answers."""
    settings = tuple(f"{name}={value}" for name, value in SETTINGS.items())
    wanted = asks(ASKS, SEED)
    answers = right_answers(wanted, settings, right)
    whole = merged(example("cpu-demo"), RELEASE, values)
    made = LoadedRelease(cluster, cluster.client(), whole, wanted, answers)
    made.apply({}, "pre-install")
    cluster.settle()
    return made


@dataclass(slots=True)
class LoadedRelease:
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
        moved = {name: more(before.get(name, 0), now) for name, now in self.handoffs().items()}
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


def more(before: int, now: int) -> int:
    """Return how far a counter has come, which begins at 0 when its process starts again."""
    return now - before if now >= before else now
