"""A request's span has the attributes of OpenTelemetry's conventions for generative AI, sampled or
exported afterwards, and none of them holds a client's text."""

from __future__ import annotations

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from baton.runtime.telemetry import tracing
from tests.support.router_process import RunningRouter, StartRouter
from tests.support.span_values import span_values
from tests.support.trace_collector import ListeningCollector
from tests.support.waiting import eventually

SECRET = "xylophone-4711"


async def ended(running: RunningRouter, count: int) -> None:
    """The answer's last byte comes before its trace is stored and its spans are queued."""
    await eventually(lambda: _has_traces(running, count))


async def _has_traces(running: RunningRouter, count: int) -> bool:
    return len((await running.http.get("/traces?latest=9")).json()["traces"]) == count


async def test_a_span_says_what_was_asked_and_answered(
    router: StartRouter, collector: ListeningCollector
) -> None:
    servicer, endpoint = collector
    async with router() as running:
        tracing.setup("router", endpoint)
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 42}
        body = {"messages": [{"role": "user", "content": SECRET}], "stop": [SECRET], "n": 2}
        reply = await running.chat(**body, **sampling, max_tokens=3, stream=True)
        assert reply.status_code == 200, reply.text
        await ended(running, 1)
        tracing.shutdown(10.0)
    span = servicer.spans["request"]
    found = span_values(span)
    assert span.kind == Span.SPAN_KIND_SERVER
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.provider.name"] == "baton"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "tiny"
    asked = {name: found[f"gen_ai.request.{name}"] for name in sampling}
    assert asked == sampling
    assert found["gen_ai.request.choice.count"] == 2
    assert found["gen_ai.request.max_tokens"] == 3
    assert found["gen_ai.request.stream"] is True
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert 0 < found["gen_ai.response.time_to_first_chunk"] < 60
    assert found["gen_ai.usage.output_tokens"] == 6
    assert SECRET not in str(servicer.all)


async def test_what_is_off_or_has_no_answer_is_absent(
    router: StartRouter, collector: ListeningCollector
) -> None:
    servicer, endpoint = collector
    async with router() as running:
        tracing.setup("router", endpoint)
        await running.complete(max_tokens=1)
        await ended(running, 1)
        tracing.shutdown(10.0)
    found = span_values(servicer.spans["request"])
    assert found["gen_ai.operation.name"] == "text_completion"
    for name in ("request.top_k", "request.choice.count", "response.time_to_first_chunk"):
        assert f"gen_ai.{name}" not in found
    assert tracing.ERROR_TYPE not in found


@pytest.mark.parametrize("ratio", [1.0, 0.0], ids=["sampled", "kept"])
async def test_a_failed_request_has_its_error(
    router: StartRouter, collector: ListeningCollector, ratio: float
) -> None:
    servicer, endpoint = collector
    async with router() as running:
        tracing.setup("router", endpoint, ratio=ratio)
        (worker,) = running.workers.values()
        worker.fail_at = {0: ("ENGINE_ERROR", False)}
        reply = await running.complete(max_tokens=2)
        assert reply.status_code == 500, reply.text
        await ended(running, 1)
        tracing.shutdown(10.0)
    span = servicer.spans["request"]
    found = span_values(span)
    assert span.kind == Span.SPAN_KIND_SERVER
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert found["error.type"] == span.status.message != ""
    assert found["request_id"] == reply.headers["x-request-id"]
    assert found["gen_ai.request.model"] == "tiny"
    assert "gen_ai.response.finish_reasons" not in found
