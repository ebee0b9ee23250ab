"""gRPC clients as they are, against a router with scripted workers: the same tokens as by HTTP,
refusals, overload, workers that die, a router that stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from baton.proto import client_pb2
from baton.router.answers.choice_text import ChoiceDelta, ChoiceText
from baton.router.dispatch.active_request import OutputToken
from baton.router.text.tokenizer import HfTokenizer
from baton.runtime import metrics
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness
from tests.support.metric_values import metric_sum, metric_value
from tests.support.router_process import FAST_ROUTER, StartGrpcRouter, refused
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

CODE = grpc.StatusCode
USER = client_pb2.Message(role="user", content="hi")
PROMPT = "the quick brown"


def prompted(**fields: Any) -> client_pb2.GenerateRequest:
    return client_pb2.GenerateRequest(model="tiny", **{"prompt": PROMPT, **fields})


def chatting(**fields: Any) -> client_pb2.GenerateRequest:
    return client_pb2.GenerateRequest(model="tiny", messages=[USER], **fields)


async def collect(
    call: AsyncIterable[client_pb2.GenerateResponse],
) -> tuple[dict[int, str], dict[int, int], client_pb2.Usage]:
    """Text and finish of each choice, and the usage, which comes once, last and alone."""
    texts: dict[int, str] = {}
    ends: dict[int, int] = {}
    messages = [message async for message in call]
    for message in messages[:-1]:
        assert message.pieces and not message.HasField("usage")
        for piece in message.pieces:
            assert piece.choice not in ends
            texts[piece.choice] = texts.get(piece.choice, "") + piece.text
            if piece.finish_reason:
                ends[piece.choice] = piece.finish_reason
    assert not messages[-1].pieces and messages[-1].HasField("usage")
    return texts, ends, messages[-1].usage


def trailers(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return {name: str(value) for name, value in error.trailing_metadata()}


def count(outcome: str) -> float:
    return metric_value(metrics.REQUESTS.labels(outcome))


# -- the same answer as by HTTP ------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 3, "max_tokens": 20},
        {"seed": 4, "max_tokens": 9, "n": 3},
        {"seed": 5, "max_tokens": 40, "stop": ["a", "e"]},
        {"seed": 6},
    ],
)
async def test_a_prompt_as_text_and_as_tokens(
    grpc_router: StartGrpcRouter, fields: JsonObject
) -> None:
    async with grpc_router() as (running, stub):
        running.workers["decode-0"].cached_tokens = 2
        http = (await running.complete(**fields)).json()
        texts = {choice["index"]: choice["text"] for choice in http["choices"]}
        tokens = (await stub.Tokenize(client_pb2.TokenizeRequest(prompt=PROMPT))).tokens
        for asked in (
            prompted(**fields),
            client_pb2.GenerateRequest(model="tiny", prompt_tokens=tokens, **fields),
        ):
            got, ends, usage = await collect(stub.Generate(asked))
            assert {index: got.get(index, "") for index in texts} == texts
            reasons = {client_pb2.STOP: "stop", client_pb2.LENGTH: "length"}
            assert {index: reasons[end] for index, end in ends.items()} == {
                choice["index"]: choice["finish_reason"] for choice in http["choices"]
            }
            assert usage.prompt_tokens == http["usage"]["prompt_tokens"] == len(tokens)
            assert usage.completion_tokens == http["usage"]["completion_tokens"]
            assert usage.cached_tokens == 2


async def test_a_chat_with_logprobs(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, stub):
        fields = {"seed": 3, "max_tokens": 8}
        http = (await running.chat(logprobs=True, top_logprobs=2, **fields)).json()
        call = stub.Generate(chatting(logprobs=2, **fields))
        assert dict(await call.initial_metadata())["x-request-id"].startswith("req-")
        text, entries = "", []
        async for message in call:
            for piece in message.pieces:
                text += piece.text
                entries += piece.logprobs
        (choice,) = http["choices"]
        assert text == choice["message"]["content"]
        assert [
            (list(entry.bytes), entry.logprob, [alt.logprob for alt in entry.alternatives])
            for entry in entries
        ] == [
            (entry["bytes"], entry["logprob"], [top["logprob"] for top in entry["top_logprobs"]])
            for entry in choice["logprobs"]["content"]
        ]
        assert len(entries) == 8 and len(entries[0].alternatives) == 2


async def test_calls_of_tools(
    grpc_router: StartGrpcRouter, tool_model: Callable[..., Path]
) -> None:
    folder = tool_model("hermes", ("<tool_call>", "</tool_call>"))
    tokenizer = HfTokenizer(folder / "tokenizer.json")
    said = 'Well.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tokens = await tokenizer.encode(said, add_special_tokens=False)
    await tokenizer.close()
    async with grpc_router(folder=folder) as (running, stub):
        running.workers["decode-0"].says = [tokens]
        asked = chatting(max_tokens=200)
        function = asked.tools.add(type="function").function
        function.name, function.parameters = "f", '{"type": "object"}'
        pieces = [p async for message in stub.Generate(asked) for p in message.pieces]
        (call,) = [call for piece in pieces for call in piece.tool_calls]
        assert "".join(piece.text for piece in pieces) == "Well."
        assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')
        assert pieces[-1].finish_reason == client_pb2.TOOL_CALLS
        back = [
            USER,
            client_pb2.Message(role="assistant", tool_calls=[call]),
            client_pb2.Message(role="tool", content="7", tool_call_id=call.id),
        ]
        again = client_pb2.GenerateRequest(model="tiny", messages=back, tools=asked.tools)
        _, _, usage = await collect(stub.Generate(again))
        assert usage.prompt_tokens > 0


async def test_tokenizer_and_models(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, stub):
        http = (await running.http.post("/tokenize", json={"prompt": PROMPT})).json()
        got = await stub.Tokenize(client_pb2.TokenizeRequest(prompt=PROMPT))
        assert list(got.tokens) == http["tokens"] and got.max_model_len == http["max_model_len"]
        back = await stub.Detokenize(client_pb2.DetokenizeRequest(tokens=got.tokens))
        assert back.prompt == PROMPT
        (model,) = (await stub.ListModels(client_pb2.ListModelsRequest())).models
        (reported,) = (await running.http.get("/v1/models")).json()["data"]
        assert (model.id, model.created, model.max_model_len) == (
            reported["id"],
            reported["created"],
            reported["max_model_len"],
        )


# -- refusals --------------------------------------------------------------------------------


async def test_bad_input_is_named_and_no_worker_hears_of_it(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, stub):
        before = count("refused")
        for asked, field, code in [
            (prompted(temperature=3), "temperature", CODE.INVALID_ARGUMENT),
            (prompted(max_tokens=5000), "max_tokens", CODE.INVALID_ARGUMENT),
            (prompted(logprobs=-1), "logprobs", CODE.INVALID_ARGUMENT),
            (
                client_pb2.GenerateRequest(model="tiny", prompt_tokens=[1, 99_999]),
                "prompt_tokens[1]",
                CODE.INVALID_ARGUMENT,
            ),
            (client_pb2.GenerateRequest(model="other", prompt="a"), "model", CODE.NOT_FOUND),
        ]:
            error = await refused(stub.Generate(asked))
            assert error.code() is code and trailers(error)["x-error-field"] == field
            assert error.details().startswith(field) or code is CODE.NOT_FOUND
            assert trailers(error)["x-request-id"].startswith("req-")
        assert count("refused") == before + 5
        with pytest.raises(grpc.aio.AioRpcError, match=r"tokens\[0\]"):
            await stub.Detokenize(client_pb2.DetokenizeRequest(tokens=[99_999]))
        with pytest.raises(grpc.aio.AioRpcError, match="either prompt or messages"):
            await stub.Tokenize(client_pb2.TokenizeRequest())
        assert not running.workers["decode-0"].seen("submit")


async def test_keys_and_whose_prefixes(grpc_router: StartGrpcRouter) -> None:
    """The same key is the same tenant by either way."""
    config = replace(FAST_ROUTER, api_keys=("k1", "k2"))
    async with grpc_router(config=config) as (running, stub):
        for given in (None, "Bearer k3", "k1", "Basic k1"):
            metadata = () if given is None else (("authorization", given),)
            error = await refused(stub.Generate(prompted(), metadata=metadata))
            assert error.code() is CODE.UNAUTHENTICATED
            assert trailers(error)["x-error-code"] == "invalid_api_key"
            with pytest.raises(grpc.aio.AioRpcError, match="API keys"):
                await stub.ListModels(client_pb2.ListModelsRequest(), metadata=metadata)
        for key in ("k1", "k2"):
            bearer = (("authorization", f"Bearer {key}"),)
            await collect(stub.Generate(prompted(), metadata=bearer))
            headers = dict(bearer)
            body = {"model": "tiny", "prompt": PROMPT}
            await running.http.post("/v1/completions", json=body, headers=headers)
        one, one_http, two, two_http = [
            submit.cache_salt for submit in running.workers["decode-0"].seen("submit")
        ]
        assert one == one_http != two == two_http


async def test_overload_says_when_to_come_back(grpc_router: StartGrpcRouter) -> None:
    config = replace(FAST_ROUTER, max_requests=2)
    async with (
        grpc_router(config=config) as (running, stub),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        worker = running.workers["decode-0"]
        worker.pause_at = 1
        held = [asyncio.create_task(collect(stub.Generate(prompted()))) for _ in range(2)]
        open_call = channel.stream_stream("/baton.client.v1.Inference/Generate")
        await eventually(lambda: len(worker.held) == 2)
        for call in (stub.Generate(prompted()), open_call()):  # of that nothing has come
            error = await refused(call)
            assert error.code() is CODE.UNAVAILABLE
            assert trailers(error)["retry-after"] == "1"
            assert trailers(error)["x-error-code"] == "overloaded"
        assert (await running.complete()).status_code == 503  # the tickets are the same
        worker.pause_at = None
        await asyncio.gather(*held)
        await collect(stub.Generate(prompted()))


# -- workers that die, bugs, the end ---------------------------------------------------------


async def test_a_migration_is_not_seen(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router(workers=("decode-0", "decode-1")) as (running, stub):
        workers = running.workers.values()
        await eventually(lambda: all(worker.seen("hello") for worker in workers))
        asked = prompted(seed=9, max_tokens=30, n=2)
        whole, _, _ = await collect(stub.Generate(asked))
        await eventually(lambda: not any(worker.held for worker in workers))
        for worker in workers:
            worker.pause_at = 7
        going = asyncio.create_task(collect(stub.Generate(asked)))
        await eventually(lambda: any(worker.held for worker in workers))
        (dying,) = [worker for worker in workers if worker.held]
        await eventually(lambda: len(next(iter(dying.held.values())).outputs) == 14)
        for worker in workers:
            worker.pause_at = 7 if worker is dying else None
        await dying.die()
        texts, ends, usage = await going
        assert texts == whole and set(ends) == {0, 1}
        assert usage.completion_tokens == 60


async def test_a_failure_at_a_worker_is_the_status(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, stub):
        running.workers["decode-0"].fail_at = {3: ("EngineError", False)}
        error = await refused(stub.Generate(prompted()))
        assert error.code() is CODE.INTERNAL and "scripted failure" not in error.details()


async def test_an_answer_that_breaks_off_has_failed(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, stub):
        running.workers["decode-0"].fail_at = {3: ("Unavailable", False)}
        failed_before, refused_before = count("failed"), count("refused")
        error = await refused(stub.Generate(prompted()))
        assert error.code() is CODE.UNAVAILABLE
        assert (count("failed"), count("refused")) == (failed_before + 1, refused_before)


async def test_a_bug_tells_nothing_of_the_inside(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, calls = ChoiceText.push, iter(range(100))

    def broken(text: ChoiceText, outputs: Sequence[OutputToken]) -> ChoiceDelta:
        if next(calls) == 2:
            raise RuntimeError("a secret of the inside")
        return push(text, outputs)

    monkeypatch.setattr(ChoiceText, "push", broken)
    async with grpc_router() as (running, stub):
        worker = running.workers["decode-0"]
        worker.step_s = 0.02
        error = await refused(stub.Generate(prompted(max_tokens=30, ignore_eos=True)))
        assert error.code() is CODE.INTERNAL and "secret" not in error.details()
        await eventually(lambda: not worker.held)


async def test_traces_logs_and_metrics(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, stub):
        finished, first = count("finished"), metric_sum(metrics.TTFT)
        trace = "0af7651916cd43dd8448eb211c80319c"
        metadata = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"), ("x-request-id", "mine"))
        with capture_logs() as reported:
            await collect(stub.Generate(prompted(user="Ada"), metadata=metadata))
        (submit,) = running.workers["decode-0"].seen("submit")
        assert trace in submit.trace_context["traceparent"]
        assert submit.request_id != "mine"
        assert count("finished") == finished + 1 and metric_sum(metrics.TTFT) > first
        (ended,) = [event for event in reported if event["event"] == "request ended"]
        assert ended["outcome"] == "finished" and ended["request_id"].startswith("req-")
        assert PROMPT not in str(reported) and "Ada" not in str(reported)


async def test_stopping_lets_calls_end_and_fails_the_remaining_ones(
    grpc_router: StartGrpcRouter,
) -> None:
    config = replace(FAST_ROUTER, drain_s=slowness())
    async with grpc_router(config=config) as (running, stub):
        worker = running.workers["decode-0"]
        worker.step_s = 0.01
        short = asyncio.create_task(collect(stub.Generate(prompted(max_tokens=20))))
        long = stub.Generate(prompted(max_tokens=3000, ignore_eos=True))
        await eventually(lambda: len(worker.held) == 2)
        running.serving.cancel()
        texts, _, _ = await short
        assert texts[0]
        error = await refused(long)
        assert error.code() is CODE.UNAVAILABLE and "the router stops" in error.details()
        assert trailers(error)["retry-after"] == "1"
        await eventually(lambda: running.serving.done())
        assert not worker.held
