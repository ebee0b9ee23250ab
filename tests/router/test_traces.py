"""The traces of a router: each request's phases add up; a key sees its own; a collector gets those
that its sample ratio takes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest

from baton.proto import client_pb2
from baton.router.answers.trace_record import LONG_REFUSAL_S
from baton.runtime import metrics
from baton.runtime.telemetry import tracing
from tests.support.metric_values import metric_value
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartGrpcRouter, StartRouter
from tests.support.trace_collector import ListeningCollector
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

KEYS = ("first-key-0123456789abcdef", "other-key-0123456789abcdef")
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
WORKERS = ("decode-0", "decode-1")


@pytest.mark.parametrize("stream", [True, False])
async def test_the_phases_of_a_request_add_up(router: StartRouter, stream: bool) -> None:
    async with router() as running:
        reply = await running.chat(stream=stream, max_tokens=5)
        found = await running.trace_of(reply)
    names = [name for name, *_ in found["path"]]
    front = ["receive", "parse", "render", "tokenize", "validate", "admit", "place", "worker"]
    assert names[: len(front)] == front
    assert names[len(front) :][:2] == ["deliver", "detokenize"] and names[-1] == "write"
    assert ("decode" in names) is not stream
    assert sum(row[1] for row in found["path"]) == pytest.approx(1e6 * found["ttft_s"], abs=20)
    assert found["ttft_s"] <= found["total_s"] and found["outcome"] == "finished"
    assert found["output_tokens"] == 5 and found["decode_worker"] == "decode-0"


async def test_a_grpc_call_has_a_trace(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, stub):
        call = stub.Generate(client_pb2.GenerateRequest(model="tiny", prompt="the", max_tokens=2))
        assert [reply async for reply in call]
        headers = dict(await call.initial_metadata())
        found = await running.trace(headers["x-request-id"])
    assert [name for name, *_ in found["path"]][:3] == ["receive", "parse", "tokenize"]
    assert found["path"][-1][0] == "write"


async def test_a_grpc_call_names_its_span(
    grpc_router: StartGrpcRouter, collector: ListeningCollector
) -> None:
    servicer, endpoint = collector
    asked = client_pb2.GenerateRequest(model="tiny", prompt="the", max_tokens=2)
    async with grpc_router() as (running, stub):
        call = stub.Generate(asked)
        assert [reply async for reply in call]
        assert tracing.RESPONSE_HEADER not in dict(await call.initial_metadata())
        tracing.setup("router", endpoint)
        call = stub.Generate(asked, metadata=[("traceparent", f"00-{TRACE}-{SPAN}-01")])
        assert [reply async for reply in call]
        headers = dict(await call.initial_metadata())
        await running.trace(headers["x-request-id"])
        tracing.shutdown(10.0)
    root = servicer.spans["request"]
    assert root.parent_span_id.hex() == SPAN
    assert headers[tracing.RESPONSE_HEADER] == f"00-{TRACE}-{root.span_id.hex()}-01"


async def test_each_prompt_of_a_request_has_its_own_trace(router: StartRouter) -> None:
    async with router() as running:
        reply = await running.complete(prompt=["the", "a"], max_tokens=2)
        assert reply.status_code == 200
        name = reply.headers["x-request-id"]
        for index in (0, 1):
            found = (await running.http.get(f"/trace/{name}-{index}")).json()
            assert sum(row[1] for row in found["path"]) == pytest.approx(
                1e6 * found["ttft_s"], abs=20
            )
        found = (await running.http.get(f"/trace/{name}")).json()
        assert found["id"] in (f"{name}-0", f"{name}-1")


async def test_a_refused_request_pushes_out_no_trace(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.dispatch.dispatcher.Dispatcher.place_wait_s", 0.2)
    async with router() as running:
        served = await running.complete(max_tokens=2)
        await running.trace_of(served)
        (worker,) = running.workers.values()
        worker.draining = True

        async def refused() -> bool:
            return (await running.complete(max_tokens=2)).status_code == 503

        await eventually(refused)
        listed = (await running.http.get("/traces")).json()["traces"]
        assert {each["outcome"] for each in listed} == {"finished"}
        assert served.headers["x-request-id"] in {each["id"] for each in listed}


async def test_a_request_refused_after_a_wait_has_a_trace(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To its client it has failed: it waited for a worker, in vain."""
    monkeypatch.setattr("baton.router.dispatch.dispatcher.Dispatcher.place_wait_s", LONG_REFUSAL_S)
    async with router() as running:
        (worker,) = running.workers.values()
        worker.draining = True
        await eventually(lambda: _is_red(running))
        failed, refused = ended("failed"), ended("refused")
        reply = await running.complete(max_tokens=2)
        assert reply.status_code == 503, reply.text
        found = await running.trace_of(reply)
    assert (ended("failed"), ended("refused")) == (failed, refused + 1)
    assert (found["outcome"], found["kept"]) == ("refused", ["failed"])
    (waited_us,) = [took for name, took, *_ in found["path"] if name == "end"]
    assert waited_us >= 1e6 * LONG_REFUSAL_S and found["ttft_s"] is None


async def test_a_request_refused_on_a_worker_after_a_wait_has_a_trace(
    router: StartRouter,
) -> None:
    config = replace(FAST_ROUTER, max_attempts=1)
    async with router(config=config, step_s=LONG_REFUSAL_S) as running:
        running.workers["decode-0"].fail_at = {0: ("Overloaded", True)}
        reply = await running.complete(max_tokens=2)
        assert reply.status_code == 503, reply.text
        found = await running.trace_of(reply)
    assert (found["outcome"], found["kept"]) == ("refused", ["failed"])
    assert [took for name, took, *_ in found["path"] if name == "end"][0] < 1e6 * LONG_REFUSAL_S


async def _is_red(running: RunningRouter) -> bool:
    return not await running.is_ready()


async def test_a_request_without_an_answer_has_no_time_to_it(router: StartRouter) -> None:
    async with router() as running:
        (worker,) = running.workers.values()
        worker.fail_at = {0: ("ENGINE_ERROR", False)}
        reply = await running.complete(max_tokens=2)
        assert reply.status_code == 500, reply.text
        found = await running.trace_of(reply)
        assert found["ttft_s"] is None and found["outcome"] == "failed" and found["path"]
        assert (await running.http.get("/traces?slow=5")).json() == {"traces": []}


def ended(outcome: str) -> float:
    return metric_value(metrics.REQUESTS.labels(outcome))


@pytest.mark.parametrize(("code", "stream"), [("Overloaded", True), ("Unavailable", False)])
async def test_an_answer_that_breaks_off_has_failed(
    router: StartRouter, code: str, stream: bool
) -> None:
    async with router() as running:
        running.workers["decode-0"].fail_at = {3: (code, False)}
        failed, refused = ended("failed"), ended("refused")
        reply = await running.complete(max_tokens=9, stream=stream)
        assert code.lower() in reply.text and (reply.status_code == 200) is stream
        found = await running.trace_of(reply)  # it is stored after the error was sent
    assert (ended("failed"), ended("refused")) == (failed + 1, refused)
    assert (found["outcome"], found["kept"]) == ("failed", ["failed"])
    assert found["output_tokens"] == 3


async def test_an_error_before_the_first_token_is_a_refusal(router: StartRouter) -> None:
    async with router() as running:
        running.workers["decode-0"].fail_at = {0: ("Overloaded", False)}
        failed, refused = ended("failed"), ended("refused")
        assert (await running.complete(max_tokens=9)).status_code == 503
        assert (ended("failed"), ended("refused")) == (failed, refused + 1)


async def test_a_key_sees_its_own_requests_alone(router: StartRouter) -> None:
    config = replace(FAST_ROUTER, api_keys=KEYS)
    mine, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    async with router(config=config) as running:
        reply = await running.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "the quick", "max_tokens": 2},
            headers=mine,
        )
        assert reply.status_code == 200, reply.text
        await running.trace_of(reply, **mine)
        path = f"/trace/{reply.headers['x-request-id']}"
        missing = await running.http.get(path, headers=other)
        assert missing.status_code == 404
        others = missing.json()["error"]["message"].replace(reply.headers["x-request-id"], "")
        assert not any(character.isdigit() for character in others)  # how many others have
        assert (await running.http.get(path)).status_code == 401
        listed = (await running.http.get("/traces?slow=5", headers=mine)).json()["traces"]
        assert [each["id"] for each in listed] == [reply.headers["x-request-id"]]
        assert (await running.http.get("/traces", headers=other)).json() == {"traces": []}


@pytest.mark.parametrize("query", ["slow=0", "slow=x", "latest=1001", "slow=-1", "slow=%C2%B2"])
async def test_a_count_out_of_range_is_refused(router: StartRouter, query: str) -> None:
    async with router(workers=(), wait=False) as running:
        reply = await running.http.get(f"/traces?{query}")
        assert reply.status_code == 400 and "1 to 1000" in reply.text


async def migrated(running: RunningRouter, arrived: list[int], **headers: str) -> httpx.Response:
    """An answer whose first worker died after three tokens."""
    await eventually(lambda: all(w.seen("hello") for w in running.workers.values()))
    arrived.clear()
    for worker in running.workers.values():
        worker.pause_at = 3
    body = {"model": "tiny", "prompt": "the quick brown", "max_tokens": 9, "stream": True}
    asking = asyncio.create_task(running.http.post("/v1/completions", json=body, headers=headers))
    await eventually(
        lambda: any(
            len(held.outputs) == 3
            for worker in running.workers.values()
            for held in worker.held.values()
        )
    )
    (dying,) = [
        worker
        for worker in running.workers.values()
        if any(len(held.outputs) == 3 for held in worker.held.values())
    ]
    await eventually(lambda: len(arrived) == 3)
    for worker in running.workers.values():
        worker.pause_at = None if worker is not dying else worker.pause_at
    await dying.die()
    return await asking


async def test_a_migration_follows_the_first_token(router: StartRouter, arrived: list[int]) -> None:
    async with router(workers=WORKERS) as running:
        reply = await migrated(running, arrived)
        found = await running.trace_of(reply)
    assert found["kept"] == ["migrated"] and found["migrations"] == 1
    assert [name for name, *_ in found["after"]][:3] == ["decode", "place", "worker"]
    assert found["path"][-1][0] == "write"


async def test_a_collector_gets_a_migrated_request_of_no_sample(
    router: StartRouter, arrived: list[int], collector: ListeningCollector
) -> None:
    servicer, endpoint = collector
    async with router(workers=WORKERS) as running:
        tracing.setup("router", endpoint, ratio=0.0)
        await running.complete(max_tokens=2)
        reply = await migrated(running, arrived, **UNSAMPLED)
        await running.trace_of(reply)
        tracing.shutdown(10.0)
    roots = [span for span in servicer.all if span.name == "request"]
    (root,) = roots
    assert root.trace_id.hex() == TRACE and root.parent_span_id.hex() == SPAN
    others = [span for span in servicer.all if span is not root]
    assert {span.parent_span_id for span in others} == {root.span_id}
    assert {"receive", "worker", "write", "decode"} <= {span.name for span in others}
    assert reply.headers["traceresponse"].startswith(f"00-{TRACE}-{root.span_id.hex()}-")


async def test_all_workers_of_a_migrated_request_get_its_trace(
    router: StartRouter, arrived: list[int], collector: ListeningCollector
) -> None:
    """Their spans have the ids that came with the request."""
    servicer, endpoint = collector
    async with router(workers=WORKERS) as running:
        tracing.setup("router", endpoint)
        reply = await migrated(running, arrived, traceparent=f"00-{TRACE}-{SPAN}-01")
        await running.trace_of(reply)
        tracing.shutdown(10.0)
        submits = [worker.seen("submit") for worker in running.workers.values()]
    root = servicer.spans["request"]
    assert sorted(submit.attempt for (submit,) in submits) == [1, 2]
    for (submit,) in submits:
        assert submit.trace_context["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"


async def test_a_sampled_request_has_the_routers_phases(
    router: StartRouter, collector: ListeningCollector
) -> None:
    servicer, endpoint = collector
    async with router() as running:
        tracing.setup("router", endpoint)
        reply = await running.complete(max_tokens=2)
        found = await running.trace_of(reply)
        tracing.shutdown(10.0)
    spans = servicer.spans
    assert {"request", "receive", "tokenize", "place", "write"} <= set(spans)
    begin = spans["receive"].start_time_unix_nano
    assert abs(begin - spans["request"].start_time_unix_nano) < 1_000_000
    assert found["trace_id"] == spans["request"].trace_id.hex()
    values = {each.key: each.value.int_value for each in spans["request"].attributes}
    assert values["gen_ai.usage.input_tokens"] == found["prompt_tokens"] > 0
    assert values["gen_ai.usage.output_tokens"] == 2
    span_id = spans["request"].span_id.hex()
    assert reply.headers["traceresponse"].startswith(f"00-{found['trace_id']}-{span_id}-0")


async def test_without_a_collector_there_is_no_trace_header(router: StartRouter) -> None:
    async with router() as running:
        assert "traceresponse" not in (await running.complete(max_tokens=1)).headers
