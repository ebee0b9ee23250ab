"""Candidates of a handoff: which is tried again, which is given up, and when patience ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.decode_worker import handoffs
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import handoff_metrics
from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.runtime.errors import (
    BatonError,
    Draining,
    EngineError,
    HandoffError,
    Incompatible,
    LeaseLost,
    OutOfMemory,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.cluster import Cluster
from tests.support.grant_admission import before_each_admission
from tests.support.metric_values import metric_value
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually
from tests.support.worker_parts import fetches_of, open_streams, peers_of

PROMPT = list(range(30))


class Bench:
    """One decode worker, two prefill workers that may refuse, and which were asked."""

    def __init__(self, step_s: float = 0.0, lease_s: float = 5.0) -> None:
        config = Config(
            pool=PoolConfig(block_size=4),
            step=StepConfig(prefill_tokens=32, chunk_tokens=16, local_prefill_tokens=8),
            handoff=HandoffConfig(lease_s=lease_s),
        )
        self.cluster = Cluster(config, lambda _: step_s)
        self.asked: list[str] = []
        self.forgotten: list[bytes] = []
        self.refusals: dict[str, list[BatonError]] = {"prefill-0": [], "prefill-1": []}
        for name in self.refusals:
            self._script(name)
        worker = self.cluster.add_decode("decode-0", 64).worker
        peers: Any = peers_of(worker)
        self._forget = peers.forget
        peers.forget = self._forgotten
        self.client = Client(self.cluster, "decode-0")

    def openings(self, name: str) -> list[handoff_pb2.OpenHandoff]:
        """Those that this prefill worker is asked from now on."""
        seen: list[handoff_pb2.OpenHandoff] = []
        before_each_admission(self.cluster.prefill[name].worker.grants, seen.append)
        return seen

    def _script(self, name: str) -> None:
        def answer(opening: handoff_pb2.OpenHandoff) -> None:
            self.asked.append(name)
            if self.refusals[name]:
                raise self.refusals[name].pop(0)

        before_each_admission(self.cluster.add_prefill(name, 64).worker.grants, answer)

    def _forgotten(self, boot_id: bytes) -> None:
        self.forgotten.append(boot_id)
        self._forget(boot_id)

    def boot_id(self, name: str) -> bytes:
        return self.cluster.prefill[name].worker.boot_id

    async def run(self) -> Request:
        request = self.client.submit(PROMPT)
        await request.finished()
        return request


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(handoffs, "BUSY_PAUSE_S", 0.001)
    made = Bench()
    yield made
    await made.cluster.quiet()
    await made.cluster.close()


async def test_a_handoff_tells_what_is_left_of_its_request(bench: Bench) -> None:
    openings = bench.openings("prefill-0")
    for deadline_ms in (0, 60_000):
        await bench.client.submit(
            PROMPT, deadline_ms=deadline_ms, salt=b"%d" % deadline_ms
        ).finished()
    without, with_one = [opening.deadline_ms for opening in openings]
    assert without == 0 and 50_000 < with_one <= 60_000


async def test_the_best_candidate_alone_is_asked(bench: Bench) -> None:
    request = await bench.run()
    assert request.tokens() == request.expected()
    assert bench.asked == ["prefill-0"]


async def test_each_try_has_an_id_that_this_worker_made(bench: Bench) -> None:
    """Two tries, two choices' groups or two requests never share the name of their transfer."""
    minted: list[bytes] = []
    for node in bench.cluster.prefill.values():
        before_each_admission(node.worker.grants, lambda opening: minted.append(opening.handoff_id))
    bench.refusals["prefill-0"] = [Overloaded("full")]
    await asyncio.gather(*(bench.run() for _ in range(4)))
    assert len(minted) == len(set(minted)) == 5
    assert {len(name) for name in minted} == {16}


async def test_a_busy_candidate_is_asked_again_after_the_others(bench: Bench) -> None:
    bench.refusals["prefill-0"] = [Overloaded("full")]
    bench.refusals["prefill-1"] = [Overloaded("full")]
    request = await bench.run()
    assert request.tokens() == request.expected()
    assert bench.asked == ["prefill-0", "prefill-1", "prefill-0"]
    assert bench.forgotten == []


@pytest.mark.parametrize(
    ("error", "forgotten"),
    [
        (WorkerLost("stopping"), True),
        (HandoffError("odd"), False),
        (Incompatible("odd"), False),
        (LeaseLost("silent"), False),  # the leases of other handoffs may hold
    ],
)
async def test_a_candidate_that_fails_is_not_asked_again(
    bench: Bench, error: BatonError, forgotten: bool
) -> None:
    bench.refusals["prefill-0"] = [error] * 9
    bench.refusals["prefill-1"] = [Overloaded("full")] * 2
    request = await bench.run()
    assert request.tokens() == request.expected()
    assert bench.asked == ["prefill-0", "prefill-1", "prefill-1", "prefill-1"]
    assert bench.forgotten == ([bench.boot_id("prefill-0")] if forgotten else [])


async def broken_at_once(bench: Bench, wave: bytes) -> list[Request]:
    """Requests whose handoffs from prefill-0 are all open as its connection breaks."""
    boot_id, links = bench.boot_id("prefill-0"), bench.cluster.open_links
    links.clear()
    requests = [bench.client.submit(PROMPT[:14], salt=wave + b"%d" % n) for n in range(5)]
    async with asyncio.timeout(20):
        while sum(at == boot_id for _, at in links) < len(requests):
            await asyncio.sleep(0)
    streams = [link for link, at in links if at == boot_id]
    await asyncio.gather(*(link.close() for link in streams))
    await asyncio.gather(*(request.finished() for request in requests))
    return requests


@on_virtual_time
async def test_a_lost_connection_is_reported_and_forgotten_once() -> None:
    """All its handoffs go elsewhere, and one of them accuses: five accusations open a circuit.
    The next connection to the same worker may break again."""
    bench = Bench(step_s=0.05, lease_s=1.5)  # broken streams leave pins until it is over
    worker = bench.cluster.decode["decode-0"].worker
    boot_id = bench.boot_id("prefill-0")
    for count, wave in enumerate((b"a", b"b"), 1):
        requests = await broken_at_once(bench, wave)
        assert all(request.tokens() == request.expected() for request in requests)
        accused = [list(request.asked[-1].failed_boot_ids) for request in requests]
        assert sorted(accused) == [[]] * 4 + [[boot_id]]
        assert {request.asked[-1].prefill_boot_id for request in requests} == {
            bench.boot_id("prefill-1")
        }
        assert bench.forgotten == [boot_id] * count
    assert open_streams(worker) == 0
    await bench.cluster.quiet()
    await bench.cluster.close()


@pytest.mark.parametrize(("error", "counted"), [(LeaseLost("silent"), 1), (WorkerLost("gone"), 0)])
async def test_a_lease_that_has_run_out_is_counted(
    bench: Bench, error: BatonError, counted: int
) -> None:
    expired = handoff_metrics.LEASES_EXPIRED
    before = metric_value(expired)
    bench.refusals["prefill-0"] = [error]
    await bench.run()
    assert metric_value(expired) == before + counted


async def test_a_request_fails_retryably_when_all_stay_busy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoffs, "BUSY_TIMEOUT_S", -1.0)
    for refusals in bench.refusals.values():
        refusals.extend([Overloaded("full")] * 9)
    request = await bench.run()
    failure = request.end().failure
    assert (failure.code, failure.retryable) == ("Overloaded", True)
    assert request.tokens() == [] and bench.asked == ["prefill-0", "prefill-1"]


async def test_without_patience_one_more_candidate_is_still_asked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoffs, "BUSY_TIMEOUT_S", -1.0)
    bench.refusals["prefill-0"] = [Overloaded("full")] * 9
    request = await bench.run()
    assert request.tokens() == request.expected()
    assert bench.asked == ["prefill-0", "prefill-1"]


async def test_a_cancel_ends_the_wait_for_a_busy_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoffs, "BUSY_PAUSE_S", 3600.0)
    monkeypatch.setattr(handoffs, "MAX_BUSY_PAUSE_S", 3600.0)
    for refusals in bench.refusals.values():
        refusals.append(Overloaded("full"))
    request = bench.client.submit(PROMPT)
    await eventually(lambda: len(bench.asked) >= 2, 20)
    bench.client.cancel(request)
    await request.finished()
    assert request.end().end == worker_pb2.CANCELLED


async def test_without_candidates_the_prompt_is_computed_here(bench: Bench) -> None:
    for refusals in bench.refusals.values():
        refusals.extend([HandoffError("odd")] * 9)
    request = await bench.run()
    assert request.tokens() == request.expected()
    assert bench.asked == ["prefill-0", "prefill-1"]
    assert bench.cluster.decode["decode-0"].engine.steps > len(request.tokens())


@pytest.mark.parametrize(
    ("errors", "ends"),
    [
        ((Draining("stopping"), Draining("stopping")), "StalePlacement"),
        ((Draining("stopping"), Unavailable("not registered")), "StalePlacement"),
        ((Draining("stopping"), WorkerLost("gone")), ""),
        ((HandoffError("odd"), Draining("stopping")), ""),
        ((EngineError("the step of this slice failed"), Unavailable("not registered")), ""),
    ],
)
async def test_the_router_replaces_candidates_that_have_all_left(
    bench: Bench, errors: tuple[BatonError, BatonError], ends: str
) -> None:
    """But where one has failed, the next attempt may fail too: the prompt is computed here."""
    for refusals, error in zip(bench.refusals.values(), errors, strict=True):
        refusals.extend([error] * 9)
    request = await bench.run()
    assert bench.asked == ["prefill-0", "prefill-1"]
    failure = request.end().failure
    assert (failure.code, failure.retryable) == (ends, bool(ends))
    assert request.tokens() == ([] if ends else request.expected())


async def test_without_a_candidate_the_prompt_is_computed_here(bench: Bench) -> None:
    bench.cluster.candidates = list
    request = await bench.run()
    assert request.tokens() == request.expected() and bench.asked == []


async def test_a_candidate_of_an_earlier_start_is_passed_over(bench: Bench) -> None:
    candidates = bench.cluster.candidates
    stale, fresh = candidates()
    stale.boot_id = b"x" * 16
    bench.cluster.candidates = lambda: [stale, fresh]
    request = await bench.run()
    assert request.tokens() == request.expected()
    assert bench.asked == ["prefill-1"]


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (WorkerLost("gone"), True),
        (LeaseLost("silent"), True),
        (Incompatible("odd"), True),
        (EngineError("the step of this slice failed"), True),
        (OutOfMemory("a long prompt"), False),
        (Draining("stopping"), False),
    ],
)
async def test_the_router_learns_once_whose_handoff_failed(
    bench: Bench, error: BatonError, reported: bool
) -> None:
    bench.refusals["prefill-0"] = [error]
    request = await bench.run()
    assert request.tokens() == request.expected()
    first, second = bench.boot_id("prefill-0"), bench.boot_id("prefill-1")
    failed = [first] if reported else []
    assert [(word.prefill_boot_id, list(word.failed_boot_ids)) for word in request.asked] == [
        (b"", failed),
        (second, failed),
    ]
    assert {word.attempt for word in request.asked} == {1}


async def test_the_router_learns_of_each_candidate_after_the_first(bench: Bench) -> None:
    busy = Overloaded("full")
    bench.refusals["prefill-0"] = [busy, busy, HandoffError("odd")]
    bench.refusals["prefill-1"] = [busy, HandoffError("odd")]
    request = await bench.run()
    assert request.tokens() == request.expected()
    first, second = bench.boot_id("prefill-0"), bench.boot_id("prefill-1")
    assert [(word.prefill_boot_id, list(word.failed_boot_ids)) for word in request.asked] == [
        (second, []),
        (first, []),
        (second, []),
        (b"", [second]),
        (first, [second]),
        (b"", [second, first]),  # no worker: it is computed here
    ]
    assert (await bench.run()).asked == []


async def test_a_revoked_grant_asks_its_first_candidate_again(bench: Bench) -> None:
    """A worker that fails it once more is reported once: one request is one failure."""
    bench.refusals["prefill-0"] = [HandoffError("odd")] * 2
    worker = bench.cluster.decode["decode-0"].worker
    taken: list[asyncio.Task[None]] = []

    def once(_: handoff_pb2.OpenHandoff) -> None:
        if not taken:
            taken.extend(fetches_of(worker))
            taken[0].cancel()

    before_each_admission(bench.cluster.prefill["prefill-1"].worker.grants, once)
    request = await bench.run()
    assert request.tokens() == request.expected() and taken
    first, second = bench.boot_id("prefill-0"), bench.boot_id("prefill-1")
    reported = [(b"", [first]), (second, [first])]
    again = [(first, [first]), *reported]
    assert [
        (word.prefill_boot_id, list(word.failed_boot_ids)) for word in request.asked
    ] == reported + again
