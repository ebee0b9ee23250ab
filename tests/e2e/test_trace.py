"""One trace tells where a request's time went: router, decode and prefill worker together. So do
all their logs, by its id; and neither tells what was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton.runtime.telemetry.timeline import covered
from chaos.cluster import Cluster
from tests.support.machine_speed import timers
from tests.support.span_values import span_values
from tests.support.trace_collector import Collector, ListeningCollector
from tests.support.waiting import eventually

ROUTER = {"receive", "parse", "tokenize", "admit", "place", "send", "detokenize", "write"}
PREFILL = {"prefill_queue", "chunk", "first_token"}  # the last is reported by the decode worker
AFTER = {"verify", "decode_queue", "step"}
PHASES = ROUTER | PREFILL | AFTER | {"request", "credit_wait", "offer", "fetch"}
PHASES |= {"prefill", "handoff", "decode"}  # what their phases add up to
TRACE, OTHER_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"
BODY = {"model": "small", "prompt": "a stone " * 150, "max_tokens": 4}
SECRET = "xylophone-4711"
PROCESSES = ("router", "decode-0", "prefill-0")


def traced(trace: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}


async def whole(servicer: Collector, trace: str, phases: set[str]) -> list[Span]:
    """The spans of a trace, once those of all these phases and their parents have come."""

    def found() -> list[Span]:
        return [span for span in list(servicer.all) if span.trace_id.hex() == trace]

    def complete() -> bool:
        spans = found()
        known = {span.span_id for span in spans}
        orphans = {span.name for span in spans if span.parent_span_id not in known}
        return {span.name for span in spans} >= phases and orphans <= {"request"}

    await eventually(complete, show=lambda: [span.name for span in found()])
    return found()


@dataclass(frozen=True)
class Reported:
    """What spans and logs tell of one request, and of a secret that was asked afterwards."""

    request_id: str
    ttft_s: float  # as the router has it
    spans: Sequence[Span]  # of the request
    chat_spans: Sequence[Span]  # of the other one
    all_spans: str
    services: set[str]
    logs: dict[str, str]  # of each process


@pytest.fixture(scope="module")
def reported(
    make_shared_cluster: Callable[..., Cluster],
    shared_collector: ListeningCollector,
    corrupting: tuple[str, ...],
) -> Reported:
    """Of the reads, the first and the eleventh are spoiled: the latter is the request's own."""
    servicer, endpoint = shared_collector
    cluster = make_shared_cluster(
        "router.placement=disaggregated",
        *timers(),
        "step.chunk_tokens=16",
        f"telemetry.otlp_endpoint={endpoint}",
        "telemetry.log_level=debug",
    ).start(1, 1, command=corrupting)

    async def story() -> tuple[str, float, list[Span], list[Span]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            answer = await client.post("/v1/completions", json=BODY, headers=traced(TRACE))
            assert answer.status_code == 200, answer.text
            chat = {"model": "small", "messages": [{"role": "user", "content": SECRET}]}
            for body, status in ((chat, 200), (chat | {"temperature": SECRET}, 400)):
                asked = await client.post(
                    "/v1/chat/completions", json=body, headers=traced(OTHER_TRACE)
                )
                assert asked.status_code == status, asked.text
            spans = await whole(servicer, TRACE, PHASES)
            chat_spans = await whole(servicer, OTHER_TRACE, PHASES | {"render"})
            name = answer.headers["x-request-id"]
            found = (await client.get(f"/trace/{name}")).json()
        return name, found["ttft_s"], spans, chat_spans

    request_id, ttft_s, spans, chat_spans = asyncio.run(story())
    cluster.quiet(10.0)
    logs = {name: (cluster.folder / f"{name}.log").read_text() for name in PROCESSES}
    assert {span.trace_id.hex() for span in servicer.all} == {TRACE, OTHER_TRACE}  # the clients'
    collected = str(servicer.all), servicer.services, logs
    return Reported(request_id, ttft_s, spans, chat_spans, *collected)


def test_all_phases_of_a_request_are_in_one_trace(reported: Reported) -> None:
    assert reported.services == {f"baton-{name}" for name in PROCESSES}
    by_id = {span.span_id: span for span in reported.spans}

    def ancestors(span: Span) -> list[str]:
        names = []
        while span.parent_span_id in by_id:
            span = by_id[span.parent_span_id]
            names.append(span.name)
        return names

    for span in reported.spans:
        assert span.name == "request" or "request" in ancestors(span), span.name
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        if span.name in ("prefill_queue", "prefill", "chunk", "offer", "fetch"):
            assert "handoff" in ancestors(span)
    assert {span.name for span in reported.spans} >= PHASES
    assert "render" in {span.name for span in reported.chat_spans}  # the other has no messages
    assert sum(span.name == "chunk" for span in reported.spans) >= 3
    (request,) = [span for span in reported.spans if span.name == "request"]
    for span in reported.spans:  # no phase begins before the request
        assert span.start_time_unix_nano >= request.start_time_unix_nano - 5_000_000


def test_the_critical_spans_cover_the_time_to_the_answer(reported: Reported) -> None:
    critical = [span for span in reported.spans if span_values(span).get("critical")]
    names = {span.name for span in critical}
    assert names >= ROUTER | PREFILL | {"credit_wait", "connect", "open", "step_wait"}
    assert not names & (AFTER | {"offer", "fetch", "handoff", "prefill"})
    times = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in critical]
    begin = min(begin for begin, _ in times)
    ttft_ns = 1e9 * reported.ttft_s
    assert covered((one - begin, other - begin) for one, other in times) > 0.9 * ttft_ns
    assert max(end for _, end in times) - begin < 1.05 * ttft_ns + 2e6  # of two processes' clocks


def test_a_fetch_tells_what_was_read_and_what_was_hidden(reported: Reported) -> None:
    fetches = [span_values(span) for span in reported.spans if span.name == "fetch"]
    (handoff,) = [span_values(span) for span in reported.spans if span.name == "handoff"]
    assert len(fetches) > 2
    for each in (*fetches, handoff):
        assert each["bytes"] > 0 and each["reads"] > 0 and each["gb_per_s"] > 0
        assert each["transport"] == handoff["transport"] != ""
    assert sum(each["bytes"] for each in fetches) == handoff["bytes"]
    block_bytes = min(each["bytes"] / each["blocks"] for each in fetches)
    blocks = sum(each["blocks"] for each in fetches)
    assert handoff["bytes"] > blocks * block_bytes  # a block was read again
    assert fetches[0]["hidden"] and fetches[0]["hidden_s"] > 0
    offers = [span_values(span) for span in reported.spans if span.name == "offer"]
    assert sum(each["blocks"] for each in offers) == blocks
    assert sum(not each["hidden"] for each in offers) == 1  # that of the last chunk


def test_a_retried_handoff_is_found_by_its_request_in_all_logs(reported: Reported) -> None:
    events = {
        name: [json.loads(line) for line in log.splitlines()] for name, log in reported.logs.items()
    }
    mine = {
        name: {event["event"] for event in lines if event.get("request_id") == reported.request_id}
        for name, lines in events.items()
    }
    assert "request ended" in mine["router"]
    assert "blocks reread" in mine["decode-0"]
    assert "handoff ended" in mine["prefill-0"]
    (contact,) = [e for e in events["decode-0"] if e["event"] == "peer measured"]
    assert contact["transport"].startswith(("tcp", "shared memory, ", "not tcp, "))


def test_no_prompt_text_is_in_spans_or_logs(reported: Reported) -> None:
    assert SECRET not in reported.all_spans
    assert not [name for name, log in reported.logs.items() if SECRET in log]


@pytest.mark.nightly
async def test_a_locally_computed_prompt_has_the_same_phases(
    make_cluster: Callable[..., Cluster], collector: ListeningCollector
) -> None:
    servicer, endpoint = collector
    cluster = make_cluster(
        "router.placement=local",
        f"telemetry.otlp_endpoint={endpoint}",
        "step.local_prefill_tokens=64",
    ).start(1, 1)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        answer = await client.post("/v1/completions", json=BODY, headers=traced(TRACE))
    assert answer.status_code == 200, answer.text
    handed = {"handoff", "fetch", "verify", "offer", "prefill_queue"}
    spans = await whole(servicer, TRACE, PHASES - handed)
    assert {span.trace_id.hex() for span in servicer.all} == {TRACE}
    assert servicer.services == {"baton-router", "baton-decode-0"}
    assert not handed & {span.name for span in spans}
    computed = [span for span in spans if span.name in ("prefill", "chunk")]
    for span in computed:
        reported = {entry.key: entry.value for entry in span.attributes}
        assert reported["baton.local"].string_value == "placed"
    assert sum(span.name == "chunk" for span in computed) >= 3
    first = servicer.spans["prefill"]
    assert first.end_time_unix_nano <= servicer.spans["decode"].start_time_unix_nano + 50_000_000
