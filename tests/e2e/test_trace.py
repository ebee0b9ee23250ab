"""One trace tells where a request's time went: router, decode and prefill worker together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

PHASES = {"request", "queue", "prefill", "chunk", "handoff", "fetch", "decode"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_all_phases_of_a_request_are_in_one_trace(
    make_cluster: Callable[..., Any], collector: tuple[Any, str]
) -> None:
    servicer, endpoint = collector
    cluster = make_cluster(
        "router.placement=disaggregated",
        f"telemetry.otlp_endpoint={endpoint}",
        "step.chunk_tokens=64",
    ).start(1, 1)
    body = {"model": "small", "prompt": "a stone " * 150, "max_tokens": 4}
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text

    async with asyncio.timeout(20):
        while not set(servicer.spans) >= PHASES:
            await asyncio.sleep(0.1)
    spans = servicer.all
    assert {span.trace_id.hex() for span in spans} == {TRACE}  # the client's own
    assert servicer.services == {"baton-router", "baton-decode-0", "baton-prefill-0"}
    by_id = {span.span_id: span for span in spans}

    def ancestors(span: Any) -> list[str]:
        names = []
        while span.parent_span_id in by_id:
            span = by_id[span.parent_span_id]
            names.append(span.name)
        return names

    for span in spans:
        assert span.name == "request" or "request" in ancestors(span), span.name
        assert span.end_time_unix_nano >= span.start_time_unix_nano
    assert all("handoff" in ancestors(s) for s in spans if s.name in ("prefill", "chunk", "fetch"))
    assert sum(span.name == "chunk" for span in spans) >= 3
    request = servicer.spans["request"]
    for span in spans:  # no phase begins before the request or ends long after it
        assert span.start_time_unix_nano >= request.start_time_unix_nano - 5_000_000


async def test_a_prompt_computed_on_the_decode_worker_has_the_same_phases(
    make_cluster: Callable[..., Any], collector: tuple[Any, str]
) -> None:
    servicer, endpoint = collector
    cluster = make_cluster(
        "router.placement=local",
        f"telemetry.otlp_endpoint={endpoint}",
        "step.local_prefill_tokens=64",
    ).start(1, 1)
    body = {"model": "small", "prompt": "a stone " * 150, "max_tokens": 4}
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text

    async with asyncio.timeout(20):
        while not set(servicer.spans) >= PHASES - {"handoff", "fetch"}:
            await asyncio.sleep(0.1)
    spans = servicer.all
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert servicer.services == {"baton-router", "baton-decode-0"}
    assert not {"handoff", "fetch"} & {span.name for span in spans}
    computed = [span for span in spans if span.name in ("prefill", "chunk")]
    for span in computed:
        told = {entry.key: entry.value for entry in span.attributes}
        assert told["baton.local"].string_value == "placed"
    assert sum(span.name == "chunk" for span in computed) >= 3
    first = servicer.spans["prefill"]
    assert first.end_time_unix_nano <= servicer.spans["decode"].start_time_unix_nano + 50_000_000


async def test_a_handoff_that_stumbles_is_found_by_its_request_in_all_logs(
    make_cluster: Callable[..., Any], corrupting: tuple[str, ...]
) -> None:
    """Of the reads, the first and the eleventh are spoiled: the latter is a request's own."""
    cluster = make_cluster("router.placement=disaggregated", "step.chunk_tokens=16")
    cluster.start(1, 1, command=corrupting)
    body = {"model": "small", "prompt": "a stone " * 150, "max_tokens": 4}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    cluster.quiet(10.0)
    events = {
        name: [
            json.loads(line) for line in (cluster.folder / f"{name}.log").read_text().splitlines()
        ]
        for name in ("router", "decode-0", "prefill-0")
    }
    request_id = answer.headers["x-request-id"]
    mine = {
        name: {event["event"] for event in told if event.get("request_id") == request_id}
        for name, told in events.items()
    }
    assert "request ended" in mine["router"]
    assert "blocks had wrong checksums and were read again" in mine["decode-0"]
    assert "handoff over" in mine["prefill-0"]
    (contact,) = [e for e in events["decode-0"] if e["event"] == "peer can be read"]
    assert contact["transport"].startswith(("tcp", "shared memory, ", "not tcp, "))


async def test_no_prompt_text_is_in_spans_or_logs(
    make_cluster: Callable[..., Any], collector: tuple[Any, str]
) -> None:
    servicer, endpoint = collector
    cluster = make_cluster(f"telemetry.otlp_endpoint={endpoint}", "telemetry.log_level=debug")
    cluster.start(1, 1)
    secret = "xylophone-4711"
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        body = {"model": "small", "messages": [{"role": "user", "content": secret}]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        bad = body | {"temperature": secret}
        assert (await client.post("/v1/chat/completions", json=bad)).status_code == 400
    async with asyncio.timeout(20):
        while "request" not in servicer.spans:
            await asyncio.sleep(0.1)
    assert secret not in str(servicer.all)
    logs = "".join(path.read_text() for path in cluster.folder.glob("*.log"))
    assert secret not in logs
    assert all(json.loads(line) for line in logs.splitlines())  # every line is JSON
