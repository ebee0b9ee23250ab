"""What an answer holds of its prompt: its text, log-probabilities and token ids; and answers to
several prompts. Through HTTP, the official client, and gRPC."""

from __future__ import annotations

import json
from dataclasses import replace

import openai
import pytest

from baton.proto import client_pb2
from tests.support.json_values import Json, JsonObject
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartGrpcRouter, StartRouter
from tests.support.waiting import eventually

COMPLETE = "/v1/completions"


def client_of(running: RunningRouter) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)


def events(body: str) -> list[Json]:
    found = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(line) for line in found[:-1]]


async def test_echo_with_logprobs_as_evaluations_ask_for_it(router: StartRouter) -> None:
    """The harness sends token ids, `max_tokens` 0 or 1, and reads the echo's numbers."""
    prompt = [40, 50, 60, 70]
    async with router() as running, client_of(running) as client:
        asked: Json = {
            "model": "tiny",
            "prompt": [prompt],
            "echo": True,
            "logprobs": 2,
            "seed": 1,
        }
        answer = await client.completions.create(**asked, max_tokens=0)
        (choice,) = answer.choices
        scores: Json = choice.logprobs
        assert scores.token_logprobs == [None, -50.5, -60.5, -70.5]
        assert scores.top_logprobs[0] is None
        assert [len(top) for top in scores.top_logprobs[1:]] == [3, 3, 3]
        assert all(
            value in top.values()
            for value, top in zip(scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True)
        )
        assert choice.finish_reason == "length" and answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 0)
        more = (await client.completions.create(**asked, max_tokens=1)).choices[0]
        assert more.text.startswith(choice.text) and len(more.text) > len(choice.text)
        found: Json = more.logprobs
        assert found.token_logprobs == [None, -50.5, -60.5, -70.5, -0.5]
        assert found.text_offset == [*scores.text_offset, len(choice.text)]


async def test_echo_is_the_prompt_as_it_was_sent(router: StartRouter) -> None:
    async with router() as running:
        plain = (await running.complete(seed=2, max_tokens=5)).json()["choices"][0]["text"]
        echoed = (await running.complete(seed=2, max_tokens=5, echo=True, n=2)).json()["choices"]
        assert echoed[0]["text"] == "the quick brown" + plain
        assert echoed[1]["text"].startswith("the quick brown")
        streamed = await running.complete(seed=2, max_tokens=5, echo=True, stream=True)
        text = "".join(chunk["choices"][0]["text"] for chunk in events(streamed.text))
        assert text == "the quick brown" + plain
        submits = running.workers["decode-0"].seen("submit")
        assert not any(each.sampling.HasField("prompt_logprobs") for each in submits)


@pytest.mark.parametrize("chat", [False, True])
async def test_prompt_logprobs_by_token_id(router: StartRouter, chat: bool) -> None:
    async with router() as running:
        ask = running.chat if chat else running.complete
        body = (await ask(prompt_logprobs=1, return_token_ids=True, max_tokens=2)).json()
        holder = body if chat else body["choices"][0]
        tokens, entries = holder["prompt_token_ids"], holder["prompt_logprobs"]
        assert entries[0] is None and len(entries) == len(tokens)
        own = entries[1][str(tokens[1])]
        assert (own["logprob"], own["rank"]) == (-0.5 - tokens[1], 1 + tokens[1])
        assert entries[1]["3"]["rank"] == 1 and "decoded_token" in entries[1]["3"]
        assert len(body["choices"][0]["token_ids"]) == 2


async def test_max_tokens_0_needs_something_to_tell(router: StartRouter) -> None:
    async with router() as running:
        assert (await running.complete(max_tokens=0, prompt_logprobs=0)).status_code == 200
        assert (await running.chat(max_tokens=0, prompt_logprobs=0)).status_code == 200
        for reply in (await running.complete(max_tokens=0), await running.chat(max_tokens=0)):
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt_logprobs": 20, "prompt": [5] * 1600}, "prompt_logprobs"),
        ({"prompt_logprobs": 7, "prompt": [[5] * 100] * 50}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 3, "prompt": [5] * 600, "n": 16}, "echo"),
        ({"prompt_logprobs": 0, "prompt": [5] * 2100, "n": 16}, "prompt_logprobs"),
        ({"echo": True, "prompt": [[5] * 3000] * 6, "n": 16}, "echo"),
        ({"return_token_ids": True, "prompt": [[5] * 3000] * 6, "n": 16}, "return_token_ids"),
    ],
)
async def test_what_costs_too_much_is_refused(
    router: StartRouter, fields: Json, param: str
) -> None:
    async with router() as running:
        reply = await running.complete(**fields)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param
        assert not running.workers["decode-0"].seen("submit")


async def test_missing_scores_are_asked_for_elsewhere(router: StartRouter) -> None:
    async with router(workers=("decode-0", "decode-1")) as running:
        for worker in running.workers.values():
            worker.withholds_scores = worker.worker_id == "decode-0"
        for _ in range(4):  # some are placed on the one that withholds them
            reply = await running.complete(prompt_logprobs=0, max_tokens=1)
            assert reply.status_code == 200, reply.text
            assert len(reply.json()["choices"][0]["prompt_logprobs"]) > 1
        assert running.workers["decode-0"].seen("submit")


async def test_scores_are_asked_for_once(router: StartRouter) -> None:
    """A worker that goes on from accepted tokens scores nothing again."""
    async with router(workers=("decode-0", "decode-1")) as running:
        for worker in running.workers.values():
            worker.fail_at = {3: ("WorkerLost", True)}
        reply = await running.complete(prompt_logprobs=1, max_tokens=6)
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["choices"][0]["prompt_logprobs"]) > 1
        submits = [s for w in running.workers.values() for s in w.seen("submit")]
        wanted = [s.sampling.HasField("prompt_logprobs") for s in submits]
        began = [bool(s.choices[0].accepted) for s in submits]
        assert any(began) and [not each for each in began] == wanted


async def test_several_prompts_have_numbered_choices(router: StartRouter) -> None:
    prompts = ["the quick", "a lazy dog", "warm sun"]
    async with router() as running, client_of(running) as client:
        alone = [
            await client.completions.create(model="tiny", prompt=p, seed=6, n=2, max_tokens=4)
            for p in prompts
        ]
        fields: Json = {
            "model": "tiny",
            "prompt": prompts,
            "seed": 6,
            "n": 2,
            "max_tokens": 4,
        }
        together = await client.completions.create(**fields)
        assert [choice.index for choice in together.choices] == [*range(6)]
        texts = [choice.text for answer in alone for choice in answer.choices]
        assert [choice.text for choice in together.choices] == texts
        assert together.usage is not None and together.usage.completion_tokens == 24
        assert together.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone if a.usage)
        found = [""] * 6
        options: Json = {"include_usage": True}
        async for chunk in await client.completions.create(
            **fields, stream=True, stream_options=options
        ):
            for choice in chunk.choices:
                found[choice.index] += choice.text
            if not chunk.choices:
                assert chunk.usage == together.usage
        assert found == texts
        tokens = await running.http.post("/tokenize", json={"prompt": prompts[0]})
        lists = [tokens.json()["tokens"], [5, 6]]
        by_ids = await client.completions.create(model="tiny", prompt=lists, seed=6, max_tokens=4)
        assert by_ids.choices[0].text == texts[0] and len(by_ids.choices) == 2


async def test_a_prompt_that_fails_fails_the_answer(router: StartRouter) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]
        worker.fail_at = {2: ("EngineError", False)}
        reply = await running.complete(prompt=["a", "b", "c"], max_tokens=2000)
        assert reply.status_code == 500
        await eventually(lambda: not worker.held)


@pytest.mark.parametrize("route", [COMPLETE, "/v1/chat/completions"])
async def test_usage_and_token_ids_in_each_chunk(router: StartRouter, route: str) -> None:
    async with router() as running:
        body: JsonObject = {
            "model": "tiny",
            "max_tokens": 5,
            "stream": True,
            "return_token_ids": True,
        }
        body |= (
            {"prompt": "a"}
            if route == COMPLETE
            else {"messages": [{"role": "user", "content": "a"}]}
        )
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        running.workers["decode-0"].step_s = 0.02
        chunks = events((await running.http.post(route, json=body)).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 5 and len(set(counts)) > 1
        reported = [
            c["token_ids"] for chunk in chunks for c in chunk["choices"] if "token_ids" in c
        ]
        assert len([token for part in reported for token in part]) == 5
        first = chunks[0] if route != COMPLETE else chunks[0]["choices"][0]
        tokens = await running.http.post(
            "/tokenize", json={k: body[k] for k in body if k in ("prompt", "messages")}
        )
        assert first["prompt_token_ids"] == tokens.json()["tokens"]


async def test_grpc_clients_get_prompt_logprobs(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (_, stub):
        asked = client_pb2.GenerateRequest(
            model="tiny", prompt_tokens=[40, 50, 60], prompt_logprobs=1, max_tokens=0
        )
        answers = [answer async for answer in stub.Generate(asked)]
        (scored,) = [answer for answer in answers if answer.prompt_logprobs]
        assert [entry.token for entry in scored.prompt_logprobs] == [50, 60]
        assert [entry.logprob for entry in scored.prompt_logprobs] == [-50.5, -60.5]
        assert answers[-1].usage.completion_tokens == 0


async def test_a_prompt_of_one_token_is_not_streamed_with_its_numbers(router: StartRouter) -> None:
    async with router() as running:
        asked = {"prompt": [5], "echo": True, "logprobs": 1, "stream": True, "max_tokens": 3}
        reply = await running.complete(**asked)
        assert reply.status_code == 400 and "not streamed" in reply.json()["error"]["message"]
        reply = await running.complete(**{**asked, "stream": False})
        assert len(reply.json()["choices"][0]["logprobs"]["tokens"]) == 4


async def test_too_many_alternatives_for_one_body_are_refused(router: StartRouter) -> None:
    """They are held until the answer is whole; streamed, they are not."""
    async with router() as running:
        reply = await running.complete(prompt=["a"] * 128, logprobs=20, max_tokens=800)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "logprobs"
        assert "lower max_tokens, n or the alternatives, or stream" in reply.text
        reply = await running.chat(n=2, logprobs=True, top_logprobs=20, max_tokens=2)
        assert reply.status_code == 200
        content = reply.json()["choices"][1]["logprobs"]["content"]
        assert len(content) == 2 and len(content[0]["top_logprobs"]) == 20
        many = await running.complete(prompt=["a"] * 3, logprobs=1, max_tokens=2)
        assert [len(each["logprobs"]["tokens"]) for each in many.json()["choices"]] == [2, 2, 2]


async def test_more_prompts_than_are_served_at_once_are_invalid(router: StartRouter) -> None:
    """It was a 503 that no retry could pass."""
    async with router(config=replace(FAST_ROUTER, max_requests=2)) as running:
        reply = await running.complete(prompt=["a"] * 3, max_tokens=1)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt"
        assert (await running.complete(prompt=["a"] * 2, max_tokens=1)).status_code == 200
