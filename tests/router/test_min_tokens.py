"""`min_tokens` from the client to the worker, and what the router ignores until then."""

from __future__ import annotations

import openai
import pytest

from baton.proto import client_pb2
from tests.support.json_values import JsonObject
from tests.support.router_process import StartGrpcRouter, StartRouter


async def test_submit_bars_what_would_end_the_output(router: StartRouter) -> None:
    async with (
        router() as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
    ):
        # The scripted worker bars nothing itself: with this seed it draws no 9 in 20 tokens.
        fields: JsonObject = {"min_tokens": 20, "stop_token_ids": [9], "seed": 4}
        answer = await client.completions.create(model="tiny", prompt="the", extra_body=fields)
        assert answer.usage is not None and answer.usage.completion_tokens == 20
        fields["ignore_eos"] = True
        await client.completions.create(model="tiny", prompt="the", extra_body=fields)
        await client.completions.create(model="tiny", prompt="the", stop="x")
        found = [submit.sampling for submit in running.workers["decode-0"].seen("submit")]
        assert [(each.min_tokens, list(each.barred)) for each in found] == [
            (20, [1, 9]),
            (20, [9]),
            (0, []),
        ]


async def test_stop_strings_wait_for_the_least(router: StartRouter) -> None:
    async with router() as running:
        free = (await running.complete(seed=4, max_tokens=30)).json()["choices"][0]["text"]
        pieces = (await running.complete(seed=4, max_tokens=30, logprobs=0)).json()
        tokens = pieces["choices"][0]["logprobs"]["tokens"]
        whole = [token for token in tokens if token.isascii() and not token.startswith("bytes:")]
        stop = next(token for token in whole if token.strip())
        at = tokens.index(stop)
        ended = (await running.complete(seed=4, max_tokens=30, stop=stop)).json()
        assert ended["choices"][0]["finish_reason"] == "stop"
        fields = {"seed": 4, "max_tokens": 30, "stop": stop}
        waited = (await running.complete(**fields, min_tokens=at + 1)).json()
        text = waited["choices"][0]["text"]
        assert free.startswith(text) and stop in text
        later = [
            index for index in range(at + 1, 30) if stop in "".join(tokens[at + 1 : index + 1])
        ]
        reason = "stop" if later else "length"
        assert waited["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 5000}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": "a"}, "min_tokens"),
    ],
)
async def test_impossible_least_is_refused(
    router: StartRouter, fields: dict[str, int | str], param: str
) -> None:
    async with router() as running:
        for reply in (await running.complete(**fields), await running.chat(**fields)):
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == param


async def test_grpc_clients_have_it_too(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, stub):
        asked = client_pb2.GenerateRequest(model="tiny", prompt="a", min_tokens=3, max_tokens=4)
        async for _ in stub.Generate(asked):
            pass
        (submit,) = running.workers["decode-0"].seen("submit")
        assert submit.sampling.min_tokens == 3 and list(submit.sampling.barred) == [1]
