"""Real processes that are stopped under load: they drain, end with code 0, and every client
gets its tokens. Restarted one after the other, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from chaos.cluster import Cluster
from tests.support.json_values import JsonObject
from tests.support.request_load import Choices, RequestLoad

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def load(make_streams: Callable[..., RequestLoad]) -> RequestLoad:
    return make_streams(20, seed=23)


@pytest.mark.nightly
async def test_ending_and_role_changes_under_load_lose_nothing(
    until: Callable[..., Awaitable[None]],
    make_busy: Callable[..., Cluster],
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
) -> None:
    """A prefill and a decode worker are restarted; then the other decode worker becomes a
    prefill worker, and a decode worker again. The drain is too short for many an answer."""
    cluster = make_busy("worker.drain_s=0.1").start(1, 2)
    over = asyncio.Event()
    answers: list[list[Choices]] = []

    async def keep_asking() -> None:
        while not over.is_set():
            answers.append(await load.run(cluster.url, concurrency=12))

    asking = asyncio.create_task(keep_asking())
    for name in ("prefill-0", "decode-0"):
        await until(holding(cluster, name))
        assert await asyncio.to_thread(cluster.terminate, name) == 0
        cluster.start_worker(name.split("-")[0], name)
        await asyncio.to_thread(cluster.wait_ready, 3)
    for role in ("prefill", "decode"):
        await until(holding(cluster, "decode-1"))
        await asyncio.to_thread(cluster.change_role, "decode-1", role)
        await until(is_a(cluster, "decode-1", role))
    over.set()
    await asking
    assert answers and not [wrong for got in answers for wrong in compare(got, expected)]
    assert await asyncio.to_thread(moved, cluster) >= 1
    cluster.quiet(within_s=3.0)


def holding(cluster: Cluster, name: str) -> Callable[[], bool]:
    """Whether the worker has work now."""

    def look() -> bool:
        audit = cluster.audit(name)
        return bool(audit["running"] or audit["open_handoffs"])

    return look


def is_a(cluster: Cluster, name: str, role: str) -> Callable[[], bool]:
    return lambda: (name, role) in {(r.worker_id, r.role) for r in cluster.records().values()}


def moved(cluster: Cluster) -> float:
    """Requests that the router has placed again."""
    text = httpx.get(f"{cluster.url}/metrics", timeout=10).text
    lines = [each for each in text.splitlines() if each.startswith("baton_migrations_total{")]
    return sum(float(line.split()[1]) for line in lines)


class Balancer:
    """Sends each request over a connection of its own to a router that says it is ready."""

    def __init__(self, bodies: list[JsonObject], expected: list[str]) -> None:
        self._bodies, self._expected = bodies, expected
        self.urls: dict[str, str] = {}
        self.ready: set[str] = set()
        self.over = False
        self.answered = 0

    async def watch(self) -> None:
        async with httpx.AsyncClient(timeout=5) as client:
            while not self.over:
                for name, url in list(self.urls.items()):
                    try:
                        good = (await client.get(f"{url}/readyz")).status_code == 200
                    except httpx.TransportError:
                        good = False
                    (self.ready.add if good else self.ready.discard)(name)
                await asyncio.sleep(0.05)  # A balancer asks at this period.

    async def keep_asking(self, first: int) -> None:
        number = first
        while not self.over:
            name = sorted(self.ready)[number % len(self.ready)]
            body = self._bodies[number % len(self._bodies)]
            async with httpx.AsyncClient(timeout=60, verify=False) as client:
                answer = await client.post(f"{self.urls[name]}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["text"]
            assert text == self._expected[number % len(self._bodies)]
            self.answered += 1
            number += 1


@pytest.mark.nightly
async def test_routers_restart_one_by_one_and_nothing_is_lost(
    until: Callable[..., Awaitable[None]],
    make_busy: Callable[..., Cluster],
) -> None:
    cluster = make_busy("router.leave_s=2.0").start(0, 1)
    bodies = [
        {"model": "small", "prompt": f"stone {n}", "max_tokens": 20, "temperature": 0, "seed": n}
        for n in range(6)
    ]
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        answers = [(await client.post("/v1/completions", json=body)).json() for body in bodies]
    balancer = Balancer(bodies, [answer["choices"][0]["text"] for answer in answers])
    balancer.urls = {"router": cluster.url}
    balancer.urls["router-1"] = await asyncio.to_thread(cluster.start_router, "router-1")
    tasks = [asyncio.create_task(balancer.watch())]
    await until(lambda: len(balancer.ready) == 2)
    tasks += [asyncio.create_task(balancer.keep_asking(n)) for n in range(4)]
    for name in ("router", "router-1"):
        before = balancer.answered
        assert await asyncio.to_thread(cluster.terminate, name) == 0
        assert name not in balancer.ready and balancer.answered > before
        balancer.urls[name] = await asyncio.to_thread(cluster.start_router, name)
        await until(lambda: len(balancer.ready) == 2)
    balancer.over = True
    await asyncio.gather(*tasks)
    cluster.quiet(within_s=3.0)
