"""What is remembered of the decode workers that are not there, and for how long."""

from __future__ import annotations

import pytest

from baton.router.fleet.roster import DisconnectedWorkers
from baton.router.fleet.worker_view import WorkerCapacity
from tests.support.router_process import StartRouter
from tests.support.scripted_worker import ScriptedWorker
from tests.support.waiting import eventually

SMALL, LARGE = WorkerCapacity(16, 8, 4096), WorkerCapacity(16, 20, 4096)


def test_a_worker_that_left_is_remembered_for_a_while() -> None:
    workers = DisconnectedWorkers(keep_s=10)
    workers.add_lost("decode-0", SMALL, 100.0)
    workers.add_lost("decode-1", LARGE, 105.0)
    assert workers.capacities(109.9) == {"decode-0": SMALL, "decode-1": LARGE}
    assert workers.capacities(110.0) == {"decode-1": LARGE}
    assert workers.capacities(115.0) == {}


def test_a_returning_worker_keeps_its_role_and_a_new_one_has_any() -> None:
    workers = DisconnectedWorkers(keep_s=10)
    workers.add_lost("decode-0", SMALL, 100.0)
    workers.add_registered("decode-0", "decode", 108.0)
    workers.add_registered("decode-1", "decode", 108.0)
    assert workers.capacities(117.0) == {"decode-0": SMALL, "decode-1": WorkerCapacity()}
    assert workers.capacities(118.0) == {}  # it was announced and never came


def test_a_decode_worker_that_comes_back_as_another_is_none() -> None:
    workers = DisconnectedWorkers(keep_s=10)
    workers.add_lost("decode-0", LARGE, 100.0)
    workers.add_registered("decode-0", "prefill", 101.0)
    workers.add_registered("prefill-0", "prefill", 101.0)
    assert workers.capacities(101.0) == {}


async def test_what_only_a_dead_worker_could_hold_may_be_asked_again(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was that it is too large, which no client asks twice."""
    monkeypatch.setattr("baton.router.dispatch.dispatcher.Dispatcher.place_wait_s", 0.2)
    async with router(total_blocks=8) as running:
        registry, token = running.registry, running.workers["decode-0"].token
        large = ScriptedWorker("decode-1", registry, running.vocabulary, token, total_blocks=20)
        assert (await running.complete(max_tokens=200)).status_code == 400
        await large.start()
        try:

            async def served() -> bool:
                return bool((await running.complete(max_tokens=200)).status_code == 200)

            await eventually(served)
            await large.die()

            async def lost() -> bool:
                ready = (await running.http.get("/readyz")).json()
                return bool(ready["workers"]["decode"] == 1)

            await eventually(lost)
            for _ in range(2):
                reply = await running.complete(max_tokens=200)
                assert reply.status_code == 503 and reply.headers["retry-after"]
                assert "large enough" in reply.json()["error"]["message"]
                registry.withdraw("decode-1", large.boot_id.hex())  # and then it is forgotten
            reply = await running.complete(max_tokens=400)
            assert reply.status_code == 400 and "(320 tokens)" in reply.json()["error"]["message"]
            await large.start()
            await eventually(served)
        finally:
            await large.die()
