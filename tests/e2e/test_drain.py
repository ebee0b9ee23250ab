"""Real processes that are told to stop under load: they drain, end with code 0, and every client
gets its tokens. Started anew one after the other, nothing is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.timeout(240)

SETTINGS = (
    "router.placement=disaggregated",
    "handoff.lease_s=1.0",
    "step.chunk_tokens=64",  # long prompts take many steps, so that a drain finds them under way
    "step.prefill_tokens=64",
)


@pytest.fixture(scope="module")
def load(make_load: Callable[..., Any]) -> Any:
    made = make_load(20, seed=23)
    for body in made.bodies:
        body["stream"] = True
        body["max_tokens"] = max(24, body["max_tokens"])
        body.pop("stop", None)
    return made


@pytest.fixture(scope="module")
def expected(load: Any, alone: Any) -> Any:
    return asyncio.run(load.run(alone.url, concurrency=8))


async def until(happens: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not await asyncio.to_thread(happens):
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.005)


async def test_every_worker_is_started_anew_under_load_and_nothing_is_lost(
    make_cluster: Callable[..., Any], load: Any, expected: Any, compare: Callable[..., list[str]]
) -> None:
    cluster = make_cluster(*SETTINGS, "worker.drain_s=1.0").start(2, 2)
    over = asyncio.Event()
    answers: list[Any] = []

    async def keep_asking() -> None:
        while not over.is_set():
            answers.append(await load.run(cluster.url, concurrency=12))

    asking = asyncio.create_task(keep_asking())
    for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
        await until(lambda name=name: cluster.audit(name)["running"] > 0)  # type: ignore[misc]
        assert await asyncio.to_thread(cluster.terminate, name) == 0
        cluster.start_worker(name.split("-")[0], name)
        await asyncio.to_thread(cluster.wait_ready, 4)
    over.set()
    await asking
    assert answers and not [wrong for got in answers for wrong in compare(got, expected)]
    cluster.quiet(within_s=3.0)


class Balancer:
    """Sends each request over a connection of its own to a router that says it is ready."""

    def __init__(self, bodies: list[dict[str, Any]], expected: list[str]) -> None:
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
                await asyncio.sleep(0.05)

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


async def test_routers_are_started_anew_one_by_one_and_nothing_is_lost(
    make_cluster: Callable[..., Any],
) -> None:
    cluster = make_cluster(*SETTINGS, "router.leave_s=0.5").start(1, 1)
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


async def test_a_request_too_long_for_the_drain_goes_on_elsewhere(
    make_cluster: Callable[..., Any],
) -> None:
    cluster = make_cluster(*SETTINGS, "worker.drain_s=0.2").start(0, 2)
    body = {"model": "small", "prompt": "a stone", "max_tokens": 400, "ignore_eos": True}
    body |= {"temperature": 0, "seed": 5}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        names = ("decode-0", "decode-1")
        await until(lambda: any(cluster.audit(name)["running"] for name in names))
        (busy,) = [name for name in names if cluster.audit(name)["running"]]
        began = time.monotonic()
        assert await asyncio.to_thread(cluster.terminate, busy) == 0
        assert time.monotonic() - began < 8.0
        assert (await asking).json()["choices"][0] == whole


def test_the_admin_port_drains_with_the_token_alone(make_cluster: Callable[..., Any]) -> None:
    cluster = make_cluster(*SETTINGS).start(1, 1)
    address = cluster.records()["prefill-0"].admin_address
    url = f"http://{address}/drain"
    assert httpx.post(url, timeout=10).status_code == 401
    headers = {"Authorization": "Bearer a secret of this test"}
    assert httpx.post(url, headers=headers, timeout=10).status_code == 202
    assert cluster.wait_end("prefill-0") == 0
    body = {"model": "small", "prompt": "a stone in the river", "max_tokens": 3}
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).status_code == 200


async def test_a_worker_changes_its_role_under_load_and_nothing_is_lost(
    make_cluster: Callable[..., Any], load: Any, expected: Any, compare: Callable[..., list[str]]
) -> None:
    """decode-1 becomes the only prefill worker, and a decode worker again."""
    cluster = make_cluster(*SETTINGS, "worker.drain_s=1.0").start(1, 2)
    cluster.terminate("prefill-0")
    for role in ("prefill", "decode"):
        running = asyncio.create_task(load.run(cluster.url, concurrency=12))
        await until(lambda: cluster.audit("decode-0")["running"] > 0)
        address = cluster.records()["decode-1"].admin_address
        headers = {"Authorization": "Bearer a secret of this test"}
        async with httpx.AsyncClient(headers=headers, timeout=30) as client:
            url = f"http://{address}/role/{role}"
            assert (await client.post(url)).status_code == 202
        await until(lambda role=role: cluster.records()["decode-1"].role == role)  # type: ignore[misc]
        assert not compare(await running, expected)
        assert not compare(await load.run(cluster.url, concurrency=12), expected)
        if role == "prefill":
            assert cluster.total("baton_handoffs_total", outcome="completed") > 0
    cluster.quiet(within_s=3.0)
