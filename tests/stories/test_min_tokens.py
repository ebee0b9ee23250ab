"""`min_tokens` over real engines: no token that would end an output is drawn before it, wherever
the token is drawn, and a request that goes on at another worker draws what it would have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.models.embedded import embedded_model
from baton.proto import worker_pb2
from baton.runtime.errors import InvalidRequest
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.model_cluster import ModelCluster
from tests.support.machine_speed import slowness

PROMPT = [7 + 3 * n % 190 for n in range(37)]
MOST, LEAST = 24, 9


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    cluster = ModelCluster(embedded_model(), block_size=8)
    cluster.add_prefill("prefill-0", 64)
    cluster.add_decode("decode-0", 120)
    yield Client(cluster, "decode-0")
    await cluster.close()


async def drawn(client: Client, **asked: Any) -> tuple[list[int], int]:
    request = client.submit(PROMPT, max_tokens=MOST, **asked)
    await request.finished(60 * slowness())
    return request.tokens(), request.end().end


RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cut": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "top_logprobs": 2},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.3, "min_p": 0.01},
    "presence": {"temperature": 1.0, "presence_penalty": 0.5},
}
CUTS = {"top_k", "top_p", "min_p"}  # where one token is barred, they keep others


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "cut" else pytest.mark.nightly) for name in RULES],
)
async def test_no_barred_token_is_drawn_early(client: Client, name: str) -> None:
    rules = RULES[name]
    for local in (False, True):
        free, _ = await drawn(client, local=local, **rules)
        for early in (0, 5):  # the first is drawn where the prompt is computed
            barred = [free[early]]
            asked = {**rules, "local": local, "stop": tuple(barred)}
            ended, reason = await drawn(client, **asked)
            assert ended == free[: free.index(barred[0]) + 1] and reason == worker_pb2.STOP
            least, reason = await drawn(client, **asked, min_tokens=LEAST, barred=barred)
            assert barred[0] not in least[:LEAST] and len(least) >= LEAST
            if not rules.keys() & CUTS:
                assert least[: free.index(barred[0])] == free[: free.index(barred[0])]
            assert (reason == worker_pb2.STOP) == (least[-1] == barred[0])


async def test_migrated_request_keeps_its_least(client: Client) -> None:
    """Tokens that were accepted elsewhere count."""
    free, _ = await drawn(client, temperature=1.0)
    rules = {"temperature": 1.0, "stop": (free[2],), "min_tokens": LEAST, "barred": [free[2]]}
    whole, reason = await drawn(client, **rules)
    for accepted in (1, LEAST - 1, LEAST):
        if accepted < len(whole):
            rest = await drawn(client, **rules, accepted=whole[:accepted])
            assert rest == (whole[accepted:], reason)


async def test_all_tokens_cannot_be_barred(client: Client) -> None:
    for barred in ([1 << 20], list(range(1100))):
        with pytest.raises(InvalidRequest, match="min_tokens"):
            client.submit(PROMPT, min_tokens=2, barred=barred)
