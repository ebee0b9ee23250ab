"""Spans reach a real OTLP collector with the right parents; a dead one harms nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from baton.runtime.telemetry import timeline, tracing
from tests.support.machine_speed import slowness
from tests.support.trace_collector import ListeningCollector

pytestmark = pytest.mark.timed


@pytest.fixture(autouse=True)
def no_exporter_left() -> Iterator[None]:
    yield
    tracing.shutdown()


def test_spans_arrive_with_parents_times_and_attributes(collector: ListeningCollector) -> None:
    servicer, endpoint = collector
    tracing.setup("router", endpoint)
    assert tracing.exporting()
    with tracing.span(tracing.REQUEST, request_id="r1") as request:
        over_the_wire = tracing.inject(request)
        remote = tracing.extract(over_the_wire)
        with tracing.span(tracing.HANDOFF, remote, blocks=4) as handoff:
            tracing.annotate(handoff, outcome="completed")
            tracing.record(tracing.FETCH, 100.0, 100.5, handoff, bytes=7)
        tracing.record(tracing.CREDIT_WAIT, 90.0, 91.0, remote)
    tracing.shutdown(10.0)

    spans = servicer.spans
    assert set(spans) == {"request", "handoff", "fetch", "credit_wait"}
    assert spans["request"].parent_span_id == b""
    assert spans["handoff"].parent_span_id == spans["request"].span_id
    assert spans["fetch"].parent_span_id == spans["handoff"].span_id
    assert spans["credit_wait"].parent_span_id == spans["request"].span_id
    assert len({span.trace_id for span in spans.values()}) == 1
    assert spans["request"].trace_id.hex() == tracing.trace_id(request)
    assert spans["fetch"].start_time_unix_nano == 100_000_000_000
    assert spans["fetch"].end_time_unix_nano == 100_500_000_000
    reported = {a.key: a.value for a in spans["handoff"].attributes}
    assert reported["baton.blocks"].int_value == 4
    assert reported["baton.outcome"].string_value == "completed"
    assert servicer.services == {"baton-router"}


def test_roots_are_separate_traces_and_failures_are_marked(
    collector: ListeningCollector,
) -> None:
    servicer, endpoint = collector
    tracing.setup("decode-0", f"http://{endpoint}")
    with tracing.span("request") as one, pytest.raises(KeyError), tracing.span("prefill"):
        raise KeyError("x")
    tracing.shutdown(10.0)
    assert servicer.spans["request"].trace_id != servicer.spans["prefill"].trace_id
    assert servicer.spans["prefill"].status.code == 2  # STATUS_CODE_ERROR
    assert servicer.spans["prefill"].status.message == "KeyError"
    assert servicer.spans["request"].status.code == 0
    assert tracing.trace_id(one)


def test_what_a_process_is_stands_beside_its_spans(collector: ListeningCollector) -> None:
    servicer, endpoint = collector
    tracing.setup("decode-0", endpoint, of_process={"ranks": 4, "expert_groups": 2})
    tracing.record(tracing.DECODE, 1.0, 2.0)
    tracing.shutdown(10.0)
    assert servicer.services == {"baton-decode-0"}
    assert servicer.numbers == {"baton.ranks": 4, "baton.expert_groups": 2}


def test_an_end_before_the_start_becomes_an_empty_span(collector: ListeningCollector) -> None:
    servicer, endpoint = collector
    tracing.setup("router", endpoint)
    tracing.record(tracing.CHUNK, 5.0, 4.0)
    tracing.shutdown(10.0)
    chunk = servicer.spans["chunk"]
    assert chunk.start_time_unix_nano == chunk.end_time_unix_nano == 5_000_000_000


def test_an_unsampled_client_trace_is_not_exported(collector: ListeningCollector) -> None:
    servicer, endpoint = collector
    tracing.setup("router", endpoint)
    client = tracing.extract({"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"})
    with tracing.span("request", client) as context:
        assert tracing.trace_id(context) == "a" * 32
    tracing.shutdown(10.0)
    assert servicer.spans == {}


def test_without_an_endpoint_a_clients_context_still_flows() -> None:
    tracing.setup("router", "")
    assert not tracing.exporting()
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    with tracing.span("request", tracing.extract(headers)) as request:
        queue = tracing.record("queue", 1.0, 2.0, request)
        tracing.annotate(queue, blocks=1)
    assert tracing.inject(queue) == headers
    assert tracing.trace_id(queue) == "a" * 32


def test_without_an_endpoint_and_a_parent_there_is_no_trace() -> None:
    with tracing.span("request") as request:
        pass
    assert tracing.inject(request) == {}
    assert tracing.trace_id(request) is None


@pytest.mark.parametrize("header", ["", "nonsense", "00-zz-1-01", "00-" + "0" * 32 + "-1-01"])
def test_malformed_headers_give_an_empty_context(header: str) -> None:
    assert tracing.trace_id(tracing.extract({"traceparent": header})) is None


def test_a_refused_endpoint_delays_and_breaks_nothing() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tracing.setup("router", f"127.0.0.1:{port}")
    started = time.monotonic()
    for _ in range(2000):
        with tracing.span("request", None, request_id="r") as context:
            tracing.record("decode", 1.0, 2.0, context)
    making = time.monotonic() - started
    tracing.shutdown()
    # a refused export is retried for seconds, and 4000 spans are several exports
    assert making < 5.0 * slowness()
    assert not tracing.exporting()


def test_shutdown_gives_up_on_a_silent_collector() -> None:
    with socket.socket() as silent:  # accepts connections by its backlog, answers nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        tracing.setup("router", f"127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(2000):
            tracing.record("decode", 1.0, 2.0)
        started = time.monotonic()
        tracing.shutdown(timeout_s=0.2)
        assert time.monotonic() - started < 15.0  # four batches of 5 s each without the limit


def test_the_spans_of_workers_are_named_as_their_phases() -> None:
    """So that the router knows which phases need no span of its own."""
    phases = {name.replace(" ", "_") for name in timeline.NAMES.values()}
    assert set(tracing.PHASES) - phases == {"prefill", "offer", "handoff"}


def test_an_https_endpoint_gets_no_plain_text() -> None:
    """What arrives first is the handshake of a TLS client, not the text that HTTP/2 begins with."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        for scheme, first in (("https://", b"\x16\x03"), ("http://", b"PR"), ("", b"PR")):
            tracing.setup("router", f"{scheme}127.0.0.1:{listener.getsockname()[1]}")
            tracing.record("queue", 1.0, 2.0)
            tracing.shutdown(0.5)
            link, _ = listener.accept()
            with link:
                assert link.recv(2) == first
