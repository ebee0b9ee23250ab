"""The role controller on four real workers: the mix shifts, roles change under load, the controller
is killed amid a change, and no request fails or gets another token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from baton.planner.control.leadership import TERM_S
from chaos.cluster import Cluster
from tests.support.json_values import JsonObject
from tests.support.request_load import Choices, RequestLoad

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

LONG = " ".join(f"stone {n}" for n in range(120))  # a prompt of several chunks


@pytest.fixture(scope="module")
def load(make_streams: Callable[..., RequestLoad]) -> RequestLoad:
    """Half of the requests are prompts with few tokens to answer, the other half the reverse."""
    made = make_streams(24, seed=31)
    for number, body in enumerate(made.bodies):
        for key in ("n", "messages", "logprobs", "top_logprobs"):
            body.pop(key, None)
        heavy = number < 12
        body["prompt"] = f"{number} {LONG}" if heavy else f"lamp {number}"
        body["max_tokens"] = 2 if heavy else 120
        body["ignore_eos"] = True
    return made


@dataclass
class Asking:
    """Clients that send the first or the second half of a load again and again."""

    url: str
    load: RequestLoad
    expected: list[Choices]
    compare: Callable[..., list[str]]
    heavy: bool = True
    wrong: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def clients(self, count: int) -> AsyncIterator[None]:
        """Raises at the end if a request was not answered, or not rightly."""
        bodies = self.load.bodies
        asking = [asyncio.create_task(self._ask(n, bodies)) for n in range(count)]
        try:
            yield
        finally:
            self.over.set()
            answered = await asyncio.gather(*asking, return_exceptions=True)
            self.load.bodies = bodies
        for each in answered:
            if each is not None:
                raise each
        assert self.wrong == []

    async def _ask(self, offset: int, bodies: list[JsonObject]) -> None:
        count = 0
        while not self.over.is_set():
            first = 0 if self.heavy else 12
            self.load.bodies = bodies[first : first + 12]
            answers = await self.load.run(self.url, concurrency=8, salt=f"{offset}.{count}")
            self.wrong.extend(self.compare(answers, self.expected[first : first + 12]))
            count += 1


@pytest.fixture
def start(
    make_busy: Callable[..., Cluster],
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
) -> Callable[[float], tuple[Cluster, Asking]]:
    """Start one prefill and three decode workers, which drain in that many seconds, and a
    controller that acts; return them with their clients."""

    def started(drain_s: float) -> tuple[Cluster, Asking]:
        goals = ("slo.ttft_s=0.3", "slo.itl_s=0.5")
        made = make_busy(*goals, f"worker.drain_s={drain_s}", "step.max_sequences=4")
        cluster = made.start(1, 3)
        cluster.start_controller("--act")
        return cluster, Asking(cluster.url, load, expected, compare)

    return started


async def test_roles_follow_a_shifting_mix_and_nothing_fails(
    until: Callable[..., Awaitable[None]], start: Callable[[float], tuple[Cluster, Asking]]
) -> None:
    """Prompts alone overload the only prefill worker; then answers alone fill the batches of the
    decode workers that are left."""
    cluster, asking = start(1.0)
    async with asking.clients(2):
        for role in ("prefill", "decode"):
            await until(lambda role=role: taken(cluster)[-1:] == [role], within_s=120.0)
            name = accepted(cluster)[-1]["worker_id"]
            await until(lambda role=role, name=name: roles(cluster).get(name) == role)
            asking.heavy = False
        await asyncio.sleep(20.0)  # in which no role may turn again
    assert set(roles(cluster).values()) == {"decode", "prefill"}
    assert "prefill" not in taken(cluster)[taken(cluster).index("decode") :]
    assert cluster.terminate("controller") == 0
    cluster.quiet(within_s=5.0)


async def test_a_change_outlives_the_controller_that_ordered_it(
    until: Callable[..., Awaitable[None]], start: Callable[[float], tuple[Cluster, Asking]]
) -> None:
    """It is killed while the worker drains; the next one recalls the change, and repeats none."""
    cluster, asking = start(4.0)
    async with asking.clients(2):
        await until(lambda: len(accepted(cluster)) >= 1, within_s=120.0)
        first = accepted(cluster)[0]
        cluster.kill("controller")
        assert roles(cluster).get(first["worker_id"]) != "prefill"  # the change is under way
        cluster.start_controller("--act")
        await until(lambda: len(lines(cluster, "controller memory recalled")) == 1)
        await until(lambda: roles(cluster).get(first["worker_id"]) == "prefill")
        await asyncio.sleep(TERM_S + 5.0)  # then it may order
    later = accepted(cluster)[1:]
    assert all(step["term"] > first["term"] for step in later)
    assert all(step["boot_id"] != first["boot_id"] for step in later)
    assert set(roles(cluster).values()) == {"decode", "prefill"}
    assert cluster.terminate("controller") == 0
    cluster.quiet(within_s=10.0)


def lines(cluster: Cluster, event: str) -> list[JsonObject]:
    """The controller's log lines of an event."""
    text = (cluster.folder / "controller.log").read_text()
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [each for each in found if each["event"] == event]


def accepted(cluster: Cluster) -> list[JsonObject]:
    return lines(cluster, "role step accepted")


def taken(cluster: Cluster) -> list[str]:
    """The roles that the steps gave, in order."""
    return [step["role"] for step in accepted(cluster)]


def roles(cluster: Cluster) -> dict[str, str]:
    return {record.worker_id: record.role for record in cluster.records().values()}
