"""A handoff that fails is found by its request's id in the logs of both workers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator

import pytest
import structlog

from baton.kv_transfer.memory_mover import Fate
from baton.proto import handoff_pb2
from baton.runtime import handoff_metrics, logs
from baton.runtime.errors import Overloaded
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster
from tests.support.grant_admission import before_each_admission
from tests.support.json_values import JsonObject
from tests.support.metric_values import metric_value
from tests.support.virtual_time import on_virtual_time
from tests.support.worker_parts import decode_scheduler

TOKEN = 48_613  # of every prompt here; no log may hold it
Events = Callable[[], list[JsonObject]]


@pytest.fixture
def events(capsys: pytest.CaptureFixture[str]) -> Iterator[Events]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    logs.setup("both", "debug")

    def read() -> list[JsonObject]:
        found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        for event in found:
            del event["timestamp"]
            assert str(TOKEN) not in str(event)
        return found

    yield read
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


MakeCluster = Callable[..., Cluster]


def corrupt(cluster: Cluster) -> None:
    cluster.exchange.decide = lambda attempt: Fate(corrupt=0)


def stuck(cluster: Cluster) -> None:
    cluster.exchange.decide = lambda attempt: Fate(stuck=attempt.number <= 1)


def engine(cluster: Cluster) -> None:
    cluster.prefill["prefill-0"].engine.fail_steps = 1


def stray(cluster: Cluster) -> None:
    """An error that was not foreseen."""

    def fail(_: handoff_pb2.OpenHandoff) -> None:
        raise KeyError("odd")

    before_each_admission(cluster.prefill["prefill-0"].worker.grants, fail)


def busy(cluster: Cluster) -> None:
    refused: list[str] = []

    def refuse_once(opening: handoff_pb2.OpenHandoff) -> None:
        if not refused:
            refused.append(opening.request_id)
            raise Overloaded("full")

    before_each_admission(cluster.prefill["prefill-0"].worker.grants, refuse_once)


@pytest.mark.parametrize(
    ("fault", "heard", "granted"),
    [
        (corrupt, "handoff failed", {"end": "closed", "level": "info"}),
        (stuck, "blocks quarantined", {"end": "expired", "level": "warning"}),
        (engine, "handoff failed", {"end": "closed", "level": "warning"}),
        (stray, "handoff failed", {"end": "refused", "level": "error"}),
        (busy, "handoff refused", {"end": "refused", "level": "info"}),
    ],
)
@on_virtual_time
async def test_a_failed_handoff_is_found_by_request_on_both_workers(
    make_cluster: MakeCluster,
    events: Events,
    fault: Callable[[Cluster], None],
    heard: str,
    granted: dict[str, str],
) -> None:
    cluster = make_cluster()
    fault(cluster)
    client = Client(cluster, "decode-0")
    request = client.submit([TOKEN] * 22)
    await request.finished()
    async with asyncio.timeout(5):  # a lease may have to run out
        while cluster.prefill["prefill-0"].worker.audit()["open_handoffs"]:
            await asyncio.sleep(0.01)
    cluster.exchange.release_stuck()
    assert request.tokens() == request.expected()
    await cluster.quiet()
    reported = events()
    decode = [e for e in reported if e["component"].startswith("baton.decode_worker")]
    prefill = [e for e in reported if e["component"] == "baton.kv_transfer.peers.grants"]
    assert heard in {event["event"] for event in decode}
    assert {event["request_id"] for event in decode} == {"request-0"}
    ends = [e for e in prefill if e["event"] == "handoff ended"]
    assert {event["request_id"] for event in ends} == {"request-0"}
    assert any(granted.items() <= event.items() for event in ends)
    assert ("KeyError" in str(ends)) == (fault is stray)  # with its traceback


@on_virtual_time
async def test_two_concurrent_requests_are_distinguished(
    make_cluster: MakeCluster, events: Events
) -> None:
    """Every READ of the second one is spoiled; the first one has nothing to tell but its end."""
    cluster = make_cluster()
    client = Client(cluster, "decode-0")
    first = client.submit([TOKEN] * 22)
    second = client.submit([TOKEN, *[1] * 400])
    scheduler = decode_scheduler(cluster.decode["decode-0"].worker)
    corrupted = set(scheduler.granted[1].blocks)
    cluster.exchange.decide = lambda attempt: Fate(
        corrupt=0 if corrupted & set(attempt.local) else None
    )
    await first.finished()
    await second.finished()
    await cluster.quiet()
    reported = events()
    failed = [e["request_id"] for e in reported if e["event"] == "handoff failed"]
    assert failed == ["request-1"]
    assert sorted(e["request_id"] for e in reported if e["event"] == "handoff ended") == [
        "request-0",
        "request-1",
    ]


@on_virtual_time
async def test_a_request_that_fails_on_its_decode_worker_is_named(
    make_cluster: MakeCluster, events: Events
) -> None:
    cluster = make_cluster()
    cluster.decode["decode-0"].engine.fail_steps = 1
    request = Client(cluster, "decode-0").submit([TOKEN] * 9, local=True, n=2)
    await request.finished()
    failed = [event for event in events() if event["event"] == "request failed"]
    assert [(e["request_id"], e["choice"]) for e in failed] == [("request-0", 0), ("request-0", 1)]
    assert {(e["code"], e["level"]) for e in failed} == {("EngineError", "error")}
    await cluster.quiet()


def ended_handoffs() -> list[float]:
    outcomes = ("completed", "cancelled", "failed")
    return [metric_value(handoff_metrics.HANDOFFS.labels(outcome)) for outcome in outcomes]


@on_virtual_time
async def test_a_first_token_that_ends_its_request_is_no_fault(
    make_cluster: MakeCluster, events: Events
) -> None:
    """The READs of its blocks are called off, of which nothing warns."""
    cluster, before = make_cluster(), ended_handoffs()
    cluster.exchange.decide = lambda attempt: Fate(stuck=True)
    request = Client(cluster, "decode-0").submit([TOKEN] * 22, max_tokens=1)
    await request.finished()
    await asyncio.sleep(0.01)
    cluster.exchange.release_stuck()
    await cluster.quiet()
    assert request.tokens() == request.expected()
    outcomes = zip(ended_handoffs(), before, strict=True)
    assert [value - earlier for value, earlier in outcomes] == [1, 0, 0]
    levels = {event["level"] for event in events() if event["event"] == "blocks quarantined"}
    assert levels == {"info"}
