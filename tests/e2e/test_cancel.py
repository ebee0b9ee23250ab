"""A client that leaves: whatever phase its request is in, everything is freed on every worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import httpx
import pytest

from chaos.cluster import Cluster
from tests.support.json_values import Json, JsonObject

# 1,000 tokens take longer than the longest delay on any machine.
LONG = " ".join(f"word {n}" for n in range(200))


def body(**more: Json) -> JsonObject:
    return {
        "model": "small",
        "prompt": LONG,
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": True,
        **more,
    }


MORE_DELAYS_S = [
    pytest.param(delay_s, marks=pytest.mark.nightly)
    for delay_s in (0.01, 0.03, 0.1, 0.15, 0.5, 1.0)
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("delay_s", [0.0, 0.06, 0.25, *MORE_DELAYS_S])
async def test_a_client_that_leaves_after_a_while(
    pair: Cluster, all_freed: Callable[[], None], delay_s: float, stream: bool
) -> None:
    """The delays reach from tokenizing over queue, prefill and fetch into decoding."""
    prompt = f"{delay_s} {stream} {LONG}"  # no help from a prefix cache
    async with httpx.AsyncClient(base_url=pair.url, timeout=30) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await client.post("/v1/completions", json=body(prompt=prompt, stream=stream, n=2))
                pytest.fail("a request of 2,000 tokens should not have ended")
    all_freed()


async def test_a_client_that_leaves_after_the_first_token(
    pair: Cluster, all_freed: Callable[[], None]
) -> None:
    async with (
        httpx.AsyncClient(base_url=pair.url, timeout=30) as client,
        client.stream("POST", "/v1/completions", json=body()) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                break
    all_freed()


async def test_others_go_on_when_one_leaves(pair: Cluster) -> None:
    async with httpx.AsyncClient(base_url=pair.url, timeout=60) as client:
        staying = asyncio.create_task(
            client.post("/v1/completions", json=body(stream=False, max_tokens=60, seed=3))
        )
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.post("/v1/completions", json=body())
        answer = await staying
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 60
    pair.quiet(within_s=1.0)
