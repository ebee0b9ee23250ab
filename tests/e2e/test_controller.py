"""The role controller on four real workers: the mix shifts, roles change under load, and no request
fails or gets another token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from chaos.cluster import Cluster
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


async def test_roles_follow_a_shifting_mix_and_nothing_fails(
    until: Callable[..., Awaitable[None]],
    make_busy: Callable[..., Cluster],
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
) -> None:
    """Prompts alone overload the only prefill worker; then answers follow."""
    cluster = make_busy("slo.ttft_s=0.3", "slo.itl_s=0.5", "worker.drain_s=1.0").start(1, 3)
    cluster.start_controller("--act")
    heavy, light = load.bodies[:12], load.bodies[12:]
    wrong: list[str] = []
    over = asyncio.Event()
    phase = [heavy]

    async def keep_asking(offset: int) -> None:
        count = 0
        while not over.is_set():
            bodies = phase[0]
            load.bodies = bodies
            first = 0 if bodies is heavy else 12
            answers = await load.run(cluster.url, concurrency=8, salt=f"{offset}.{count}")
            wrong.extend(compare(answers, expected[first : first + 12]))
            count += 1

    asking = [asyncio.create_task(keep_asking(n)) for n in range(2)]
    await until(lambda: len(accepted(cluster)) >= 1, within_s=120.0)
    name = accepted(cluster)[0]["worker_id"]
    await until(lambda: roles(cluster).get(name) == "prefill")
    phase[0] = light
    await asyncio.sleep(20.0)
    over.set()
    await asyncio.gather(*asking)  # raises if a request was not answered
    assert wrong == []
    assert sorted(set(roles(cluster).values())) == ["decode", "prefill"]
    turns = [step["role"] for step in accepted(cluster)]
    assert sum(one != other for one, other in zip(turns, turns[1:], strict=False)) <= 1
    assert cluster.terminate("controller") == 0
    cluster.quiet(within_s=5.0)


def lines(cluster: Cluster, event: str) -> list[dict[str, Any]]:
    """The controller's log lines of an event."""
    text = (cluster.folder / "controller.log").read_text()
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [each for each in found if each["event"] == event]


def accepted(cluster: Cluster) -> list[dict[str, Any]]:
    return lines(cluster, "role step accepted")


def roles(cluster: Cluster) -> dict[str, str]:
    return {record.worker_id: record.role for record in cluster.records().values()}
