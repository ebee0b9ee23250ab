"""A Redis server that is slow: what the event loops of workers and routers wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

import pytest

from baton.router.fleet.registry_watcher import ANSWER_WAIT_S, RegistryWatcher
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import ANSWER_S, RegistryUnavailable
from baton.runtime.shared_registry import redis_registry
from baton.runtime.worker import announcer
from chaos.redis_server import RedisServer
from tests.runtime.shared_registry.conftest import ONE, OpenRegistry
from tests.support.machine_speed import slowness
from tests.support.redis_proxy import RedisProxy, running_proxy
from tests.support.waiting import eventually

SLOW_S, TOO_SLOW_S = 0.5, 30.0  # each piece: below and above a client's timeout
TICK_S = 0.01
OUTAGE_S = 5.0  # after which the pauses between attempts are at their longest
LOADED_S = slowness()  # that this machine may add to a wait


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[RedisProxy]:
    with running_proxy(server.port) as made:
        yield made


@contextlib.asynccontextmanager
async def longest_turn() -> AsyncIterator[list[float]]:
    """Yield a list that holds the longest time between two turns of this loop."""
    found, loop = [0.0], asyncio.get_running_loop()

    async def tick() -> None:
        while True:
            begun_s = loop.time()
            await asyncio.sleep(TICK_S)  # a turn that comes late shows what held the loop
            found[0] = max(found[0], loop.time() - begun_s - TICK_S)

    ticking = asyncio.create_task(tick())
    try:
        yield found
    finally:
        ticking.cancel()


async def listed(workers: Callable[[], Awaitable[Sequence[WorkerRecord]]]) -> None:
    """Wait until these workers are the one that is announced."""

    async def is_listed() -> bool:
        return [*await workers()] == [ONE]

    await eventually(is_listed, 30)


@pytest.mark.nightly
async def test_a_slow_server_lists_members_late_and_holds_no_loop_up(
    proxy: RedisProxy, open_client: OpenRegistry
) -> None:
    location = f"redis://127.0.0.1:{proxy.port}/0"
    settings = {"location": location, "lifetime_s": 60.0}
    worker, reader = open_client(**settings), open_client(**settings)
    proxy.delay_s = SLOW_S
    async with longest_turn() as turn:
        await worker.announce(ONE)
        await listed(reader.workers)
    assert turn[0] < SLOW_S


@pytest.mark.nightly
async def test_an_outage_s_end_lists_a_worker_that_began_in_it(
    server: RedisServer, open_client: OpenRegistry
) -> None:
    """The longest waits of both sides have been reached by then; their sum is bounded."""
    reader, worker = open_client(), open_client()
    assert await reader.workers() == []
    server.kill()
    announcing = asyncio.create_task(announcer.announce(worker, ONE))
    await asyncio.sleep(OUTAGE_S)  # both sides reach their longest pause in it
    server.start()
    begun_s = asyncio.get_running_loop().time()
    await listed(reader.workers)
    announcing.cancel()
    took_s = asyncio.get_running_loop().time() - begun_s
    assert took_s < announcer.RETRY_S + redis_registry.RECONNECT_S[1] + LOADED_S


async def test_no_call_waits_for_a_server_that_is_too_slow(
    proxy: RedisProxy, open_client: OpenRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_registry, "FULL_READ_S", 0.1)
    location = f"redis://127.0.0.1:{proxy.port}/0"
    worker, reader = open_client(location=location), open_client(location=location)
    await worker.announce(ONE)
    watcher, loop = RegistryWatcher(reader), asyncio.get_running_loop()
    await listed(watcher.workers)
    proxy.delay_s = TOO_SLOW_S
    async with longest_turn() as turn:
        begun_s = loop.time()
        with pytest.raises(RegistryUnavailable):
            await worker.announce(ONE)
        assert loop.time() - begun_s < ANSWER_S + LOADED_S
        begun_s = loop.time()
        assert [*await watcher.workers()] == [ONE]  # as known before
        assert loop.time() - begun_s < ANSWER_WAIT_S + LOADED_S
        begun_s = loop.time()
        await announcer.withdraw(worker, ONE)
        assert loop.time() - begun_s < ANSWER_S + LOADED_S
    assert turn[0] < LOADED_S
