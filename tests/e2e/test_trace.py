"""One trace tells where a request's time went: router, decode and prefill worker together. So do
all their logs, by its id; and neither tells what was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from chaos.cluster import Cluster
from tests.support.machine_speed import timers
from tests.support.waiting import eventually

PHASES = {"request", "queue", "prefill", "chunk", "handoff", "fetch", "decode"}
TRACE, OTHER_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"
BODY = {"model": "small", "prompt": "a stone " * 150, "max_tokens": 4}
SECRET = "xylophone-4711"
PROCESSES = ("router", "decode-0", "prefill-0")


def traced(trace: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}


async def whole(servicer: Any, trace: str, phases: set[str]) -> list[Any]:
    """The spans of a trace, once those of all these phases and their parents have come."""

    def found() -> list[Any]:
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
    spans: Sequence[Any]  # of the request
    all_spans: str
    services: set[str]
    logs: dict[str, str]  # of each process


@pytest.fixture(scope="module")
def reported(
    make_shared_cluster: Callable[..., Cluster],
    shared_collector: tuple[Any, str],
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

    async def story() -> tuple[str, list[Any]]:
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
        await whole(servicer, OTHER_TRACE, {"request", "queue", "decode"})
        return answer.headers["x-request-id"], spans

    request_id, spans = asyncio.run(story())
    cluster.quiet(10.0)
    logs = {name: (cluster.folder / f"{name}.log").read_text() for name in PROCESSES}
    assert {span.trace_id.hex() for span in servicer.all} == {TRACE, OTHER_TRACE}  # the clients'
    return Reported(request_id, spans, str(servicer.all), servicer.services, logs)


def test_all_phases_of_a_request_are_in_one_trace(reported: Reported) -> None:
    assert reported.services == {f"baton-{name}" for name in PROCESSES}
    by_id = {span.span_id: span for span in reported.spans}

    def ancestors(span: Any) -> list[str]:
        names = []
        while span.parent_span_id in by_id:
            span = by_id[span.parent_span_id]
            names.append(span.name)
        return names

    for span in reported.spans:
        assert span.name == "request" or "request" in ancestors(span), span.name
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        if span.name in ("prefill", "chunk", "fetch"):
            assert "handoff" in ancestors(span)
    assert sum(span.name == "chunk" for span in reported.spans) >= 3
    (request,) = [span for span in reported.spans if span.name == "request"]
    for span in reported.spans:  # no phase begins before the request
        assert span.start_time_unix_nano >= request.start_time_unix_nano - 5_000_000


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
    make_cluster: Callable[..., Cluster], collector: tuple[Any, str]
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
    spans = await whole(servicer, TRACE, PHASES - {"handoff", "fetch"})
    assert {span.trace_id.hex() for span in servicer.all} == {TRACE}
    assert servicer.services == {"baton-router", "baton-decode-0"}
    assert not {"handoff", "fetch"} & {span.name for span in spans}
    computed = [span for span in spans if span.name in ("prefill", "chunk")]
    for span in computed:
        reported = {entry.key: entry.value for entry in span.attributes}
        assert reported["baton.local"].string_value == "placed"
    assert sum(span.name == "chunk" for span in computed) >= 3
    first = servicer.spans["prefill"]
    assert first.end_time_unix_nano <= servicer.spans["decode"].start_time_unix_nano + 50_000_000
