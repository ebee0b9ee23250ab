"""The three timelines that a decode worker reports: to the first token, to the second, and after a
preemption. Each adds up to the time since the one before it."""

from __future__ import annotations

import pytest

from baton.decode_worker.request_timeline import RequestTimeline
from baton.kv_transfer.fetch_report import FetchReport
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime.telemetry.timeline import MAX_OFFERS, Timeline, read, write


def first_tokens() -> handoff_pb2.FirstTokens:
    theirs = Timeline(500.0)  # of another clock
    theirs.mark("prefill queue", 500.1)
    theirs.mark("chunk", 500.4, count=64)
    message = handoff_pb2.FirstTokens()
    write(theirs, message.timeline)
    return message


def rows(output: worker_pb2.Output) -> list[tuple[str, float]]:
    return [(p.name, round(p.seconds, 4)) for p in read(output.timeline, "decode-0")]


def fetched(offers: int = 2) -> FetchReport:
    report = FetchReport(bytes=4096, reads=offers, started=10.2, verified=11.3)
    for index in range(offers):
        report.record_offer(range(index, index + 1), 10.5 + 0.01 * index)
    for offer in report.offers:
        offer.landed, offer.verified = offer.received + 0.2, offer.received + 0.3
    report.offers[-1].landed, report.offers[-1].verified = 11.2, 11.3
    return report


def test_a_handoff_is_reported_in_two_parts() -> None:
    made = RequestTimeline(10.0)
    made.mark("credit wait", 10.1)
    made.mark("connect", 10.2)
    made.take_first(first_tokens(), "prefill-0", 10.8)
    one = worker_pb2.Output(choice=0, index=0)
    made.report(one, 11.0, (0.0, 0.0))
    assert rows(one) == [
        ("credit wait", 0.1), ("connect", 0.1), ("open", 0.1), ("prefill queue", 0.1),
        ("chunk", 0.3), ("first token", 0.3),
    ]  # fmt: skip
    assert [p.where for p in read(one.timeline, "decode-0")][3:5] == ["prefill-0"] * 2
    made.take_fetch(fetched(), 0.0)
    other = worker_pb2.Output(choice=1, index=0)
    made.report(other, 11.1, (0.0, 0.0))
    assert not other.HasField("timeline") and made.due
    two = worker_pb2.Output(choice=0, index=1)
    made.report(two, 12.0, (11.5, 11.9))
    assert rows(two) == [
        ("fetch", 0.2), ("verify", 0.1), ("decode queue", 0.2), ("step", 0.5)
    ]  # fmt: skip
    assert list(two.timeline.counts) == [1, 0, 0, 0]  # the first offer was there at 11.0
    assert list(two.timeline.fetch.begin_us) == [500_000, 510_000]
    assert list(two.timeline.fetch.verified_us) == [800_000, 1_300_000]
    assert not made.due


def test_a_fetch_that_was_hidden_takes_no_time() -> None:
    made = RequestTimeline(10.0)
    made.report(worker_pb2.Output(), 12.0, (0.0, 0.0))
    made.take_fetch(fetched(), 0.0)
    two = worker_pb2.Output(index=1)
    made.report(two, 12.5, (12.1, 12.5))
    assert rows(two)[:2] == [("fetch", 0.0), ("verify", 0.0)]
    assert two.timeline.counts[0] == 0


def test_a_fetch_of_many_offers_is_bounded() -> None:
    made = RequestTimeline(10.0)
    made.take_fetch(fetched(100), 0.0)
    output = worker_pb2.Output()
    made.report(output, 13.0, (0.0, 0.0))
    fetch = output.timeline.fetch
    assert len(fetch.begin_us) == MAX_OFFERS and sum(fetch.blocks) == 100
    assert max(fetch.verified_us) == 1_780_000


def test_a_preemption_is_reported_with_the_next_output() -> None:
    made = RequestTimeline(0.0)
    for index in (0, 1):
        made.report(worker_pb2.Output(index=index), index + 1.0, (index, index + 1.0))
    made.preempt(5.0, 6.0)
    made.mark_chunk(6.5, 8.0, 40)
    output = worker_pb2.Output(index=2)
    made.report(output, 8.5, (6.5, 8.0))
    assert output.timeline.preempted
    assert rows(output) == [
        ("decode", 3.0), ("credit wait", 1.0), ("step wait", 0.5), ("chunk", 1.5),
        ("decode queue", 0.0), ("step", 0.5),
    ]  # fmt: skip
    assert sum(us for us in output.timeline.micros) == pytest.approx(6_500_000)
    assert not made.due
