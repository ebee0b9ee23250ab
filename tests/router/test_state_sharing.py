"""Two routers share circuits over a real Redis server; without it each has its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.router.fleet import other_routers, state_sharing
from baton.router.fleet.circuits import STRIKES, Circuits
from baton.router.fleet.state_sharing import StateSharing
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.shared_registry.registry_location import open_reports
from baton.runtime.shared_registry.router_report import RouterReport
from chaos.redis_server import RedisServer, running_server
from tests.support.redis_server import required_binary
from tests.support.waiting import eventually

LIMIT_S = 30.0
WORKER = b"w" * 16


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_server(tmp_path, required_binary()) as made:
        yield made


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_sharing, "SHARE_S", 0.02)
    monkeypatch.setattr(state_sharing, "REPEAT_S", 0.1)
    monkeypatch.setattr(other_routers, "LIFETIME_S", 1.0)


@dataclass
class HintedLink:
    boot_id: bytes = WORKER
    hinted: tuple[int, int] = (0, 0)
    up: bool = False


@dataclass
class StubExchange:
    """So many others report once. So many cancellations of the follower are lost."""

    count: int = 0
    deaf: int = 0

    def wall_ns(self) -> int:
        return time.time_ns()

    async def publish(self, report: RouterReport) -> None:
        pass

    async def follow(self, received: Callable[[RouterReport], None]) -> None:
        for number in range(self.count):
            received(RouterReport(f"{number:032x}", time.time_ns(), (WORKER.hex(),)))
        for _ in range(self.deaf):
            with contextlib.suppress(asyncio.CancelledError):
                # This exchange never ends, and loses cancellations.
                await asyncio.sleep(10 * LIMIT_S)
        await asyncio.sleep(10 * LIMIT_S)  # This exchange never ends.

    async def close(self) -> None:
        pass


class Router:
    def __init__(self, server: RedisServer, number: int) -> None:
        exchange = open_reports(RegistryConfig(location=server.url), SecurityConfig(), ("token",))
        assert exchange is not None
        self.circuits = Circuits(random.Random(number))
        self.sharing = StateSharing(exchange, bytes([number]) * 16, self.circuits, list)
        self.task = asyncio.create_task(self.sharing.run())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_open_circuit_is_suspected_until_its_router_is_lost(server: RedisServer) -> None:
    one, two = Router(server, 1), Router(server, 2)
    try:
        await eventually(lambda: len(one.sharing.others) == len(two.sharing.others) == 1)
        for _ in range(int(STRIKES)):
            one.circuits.record_failure(WORKER, 0.0)
        await eventually(lambda: two.circuits.suspected == {WORKER})
        assert two.circuits.failing() == [] and one.circuits.suspected == frozenset()
        await one.end()
        await eventually(lambda: two.circuits.suspected == frozenset())
    finally:
        await one.end()
        await two.end()


async def test_lost_server_takes_the_suspicion_and_no_circuit(server: RedisServer) -> None:
    one, two = Router(server, 1), Router(server, 2)
    try:
        for _ in range(int(STRIKES)):
            one.circuits.record_failure(WORKER, 0.0)
        await eventually(lambda: two.circuits.suspected == {WORKER})
        server.kill()
        await eventually(lambda: two.circuits.suspected == frozenset())
        assert one.circuits.failing() == [WORKER]
        assert not (one.task.done() or two.task.done())
        server.start()
        await eventually(lambda: two.circuits.suspected == {WORKER})
    finally:
        await one.end()
        await two.end()


async def test_reports_are_applied_together_and_not_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 64 routers each would go through all workers 300 times a second otherwise."""
    applied = []
    monkeypatch.setattr(StateSharing, "_apply", lambda self: applied.append(1))
    monkeypatch.setattr(state_sharing, "SHARE_S", LIMIT_S)
    exchange = StubExchange(count=64)
    sharing = StateSharing(exchange, b"r" * 16, Circuits(random.Random(1)), list)
    task = asyncio.create_task(sharing.run())
    await eventually(lambda: len(sharing.others) == 64)
    assert len(applied) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_it_ends_though_the_client_loses_a_cancellation() -> None:
    """As redis-py may while it connects: the router's shutdown waits for the sharing."""
    exchange = StubExchange(deaf=2)
    sharing = StateSharing(exchange, b"r" * 16, Circuits(random.Random(1)), list)
    task = asyncio.create_task(sharing.run())
    # The exchange has to be in the call that loses a cancellation.
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait({task}, timeout=10 * state_sharing.CANCEL_AGAIN_S)
    assert task.cancelled()


async def test_after_a_fault_of_the_sharing_no_hint_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not start again: what was reported last would hold for ever."""
    link = HintedLink()
    circuits = Circuits(random.Random(1))
    sharing = StateSharing(
        StubExchange(),
        b"r" * 16,
        circuits,
        lambda: [link],
    )
    report = RouterReport("a" * 32, time.time_ns(), (WORKER.hex(),), ((WORKER.hex(), 2, 30),))
    assert sharing.others.learn(report, asyncio.get_running_loop().time(), time.time_ns())
    task = asyncio.create_task(sharing.run())
    await eventually(lambda: circuits.suspected == {WORKER} and link.hinted == (2, 30))

    def broken(now_s: float) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(sharing.others, "expire", broken)
    await asyncio.wait({task}, timeout=LIMIT_S)
    with pytest.raises(ValueError, match="a fault"):
        await task
    assert circuits.suspected == frozenset() and link.hinted == (0, 0)


async def test_fault_of_the_sharing_itself_is_logged(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: StateSharing) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(StateSharing, "_apply", broken)
    with capture_logs() as events:
        router = Router(server, 1)
        await asyncio.wait({router.task}, timeout=LIMIT_S)
    assert [e["event"] for e in events] == ["router reports ended"]
    with pytest.raises(ValueError, match="a fault"):
        await router.task
