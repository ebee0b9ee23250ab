"""Reports between routers on a real Redis server: outages, forgeries and copies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from baton.runtime import metrics
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.registry_client import RegistryUnavailable
from baton.runtime.shared_registry.registry_location import open_reports
from baton.runtime.shared_registry.report_exchange import ReportExchange
from baton.runtime.shared_registry.router_report import ReportSigner, RouterReport
from chaos.redis_server import RedisServer
from tests.support.metric_values import metric_value
from tests.support.waiting import eventually

LIMIT_S = 30.0
REPORT = RouterReport("a" * 32, 1, ("b" * 32,))


class Receiver:
    """A router that takes down what it receives."""

    def __init__(self, server: RedisServer, token: str = "token") -> None:
        config = RegistryConfig(location=server.url)
        exchange = open_reports(config, SecurityConfig(), (token,))
        assert exchange is not None
        self.exchange: ReportExchange = exchange
        self.received: list[RouterReport] = []
        self.task = asyncio.create_task(exchange.follow(self.received.append))

    async def until(self, report: RouterReport, sender: ReportExchange) -> None:
        """Have it sent until it comes with its host's name, as routers repeat their reports."""

        async def received() -> bool:
            with contextlib.suppress(RegistryUnavailable):
                await sender.publish(report)
            return replace(report, host=socket.gethostname()) in self.received

        await eventually(received, every_s=0.05)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.exchange.close()


@pytest.fixture
async def pair(server: RedisServer) -> AsyncIterator[tuple[Receiver, Receiver]]:
    one, two = Receiver(server), Receiver(server)
    yield one, two
    await one.end()
    await two.end()


def refused() -> float:
    return metric_value(metrics.ROUTER_REPORTS.labels("refused"))


async def test_routers_receive_each_others_reports(pair: tuple[Receiver, Receiver]) -> None:
    one, two = pair
    await two.until(REPORT, one.exchange)
    await one.until(RouterReport("b" * 32, 1), two.exchange)


async def test_lost_server_costs_reports_alone_and_they_come_back(
    server: RedisServer, pair: tuple[Receiver, Receiver]
) -> None:
    one, two = pair
    await two.until(REPORT, one.exchange)
    server.kill()
    with pytest.raises(RegistryUnavailable):
        await one.exchange.publish(REPORT)
    assert not (one.task.done() or two.task.done())
    server.start()
    await two.until(RouterReport("a" * 32, 2), one.exchange)


async def test_server_that_stands_still_ends_a_publication(
    server: RedisServer, pair: tuple[Receiver, Receiver]
) -> None:
    one, _ = pair
    await one.exchange.publish(REPORT)
    server.pause()
    try:
        with pytest.raises(RegistryUnavailable):
            async with asyncio.timeout(LIMIT_S):
                await one.exchange.publish(REPORT)
    finally:
        server.resume()


async def test_forged_reports_are_refused(
    server: RedisServer, pair: tuple[Receiver, Receiver]
) -> None:
    one, two = pair
    await two.until(REPORT, one.exchange)
    raw, before, taken = Redis.from_url(server.url), refused(), len(two.received)
    try:
        lie = RouterReport("a" * 32, 1 << 62, ("c" * 32,))
        forged = ReportSigner(("another token",)).write(lie)
        for content in (forged, b"nothing", ReportSigner(("token",)).write(lie)[:-2]):
            await raw.publish("baton:baton:routers", content)
        # three by each
        await eventually(lambda: refused() >= before + 6, LIMIT_S)
    finally:
        await raw.aclose()
    assert lie not in two.received and len(two.received) == taken


def test_folder_has_no_reports(tmp_path: object) -> None:
    config = RegistryConfig(location=str(tmp_path))
    assert open_reports(config, SecurityConfig(), ("token",)) is None
