"""The reports of routers, over the Redis server of their registry.

    router ── PUBLISH ──▶ Redis ── notification ──▶ the other routers

Nothing is stored: a report is repeated every second, so a router that starts, or comes back after
an outage, has all of them soon. A server that is lost costs the reports alone: the registry's
client reports the outage. All state is of one event loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.runtime import metrics
from baton.runtime.registry_client import RegistryUnavailable
from baton.runtime.shared_registry.router_report import MAX_HOST, ReportSigner, RouterReport

RECONNECT_S = (0.1, 1.0)  # first and longest wait
POLL_S = 1.0
BURST = 100  # notifications between two turns of the loop


class RedisReports:
    """Implements `ReportExchange`. `prefix` begins the channel's name; `host` is the name of this
    router's host, which goes out with its reports."""

    def __init__(
        self,
        client: Redis,
        server: str,
        prefix: str,
        signer: ReportSigner,
        wall_ns: Callable[[], int] = time.time_ns,
        host: str = "",
    ) -> None:
        self._client = client
        self._server = server
        self._channel = f"{prefix}:routers"
        self._signer = signer
        self._host = host[:MAX_HOST]
        self._wall_ns = wall_ns

    def wall_ns(self) -> int:
        return self._wall_ns()

    async def publish(self, report: RouterReport) -> None:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.publish(self._channel, self._signer.write(replace(report, host=self._host)))
        try:
            (result,) = await pipeline.execute(raise_on_error=False)
            if isinstance(result, Exception):
                raise result
        except (RedisError, OSError) as error:
            raise RegistryUnavailable(f"{self._server}: {type(error).__name__}") from error

    async def follow(self, received: Callable[[RouterReport], None]) -> None:
        pause_s = RECONNECT_S[0]
        while True:
            begun_s = _now()
            try:
                await self._follow(received)
            except (RedisError, OSError):  # logged by the registry's own client
                metrics.ROUTER_REPORTS.labels("lost").inc()
            if _now() - begun_s > RECONNECT_S[1]:
                pause_s = RECONNECT_S[0]
            # A lost server is called again after longer and longer pauses, at a random time in
            # each.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, RECONNECT_S[1])

    async def _follow(self, received: Callable[[RouterReport], None]) -> None:
        """Raises RedisError or OSError when the server fails."""
        async with self._client.pubsub() as channel:
            await channel.subscribe(self._channel)
            burst = 0
            while True:
                message = await channel.get_message(ignore_subscribe_messages=True, timeout=POLL_S)
                if message is None or message["type"] != "message":
                    continue
                report = self._signer.read(message["data"])
                if isinstance(report, str):
                    metrics.ROUTER_REPORTS.labels("refused").inc()
                else:
                    received(report)
                burst += 1
                if burst >= BURST:
                    burst = 0
                    await asyncio.sleep(0)

    async def close(self) -> None:
        await self._client.aclose()


def _now() -> float:
    return asyncio.get_running_loop().time()
