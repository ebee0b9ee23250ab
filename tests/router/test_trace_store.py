"""The store of traces is bounded in number and bytes, and knows which requests are slow."""

from __future__ import annotations

import orjson

from baton.router.answers.trace_record import RequestEnd, trace_record
from baton.router.answers.trace_store import MAX_RECORDS, MIN_RECENT, TraceStore
from baton.router.requests.request_trace import FetchedOffer, RequestTrace
from baton.runtime.telemetry.timeline import MAX_OFFERS, MAX_PHASES, Timeline
from tests.support.json_values import Json, JsonObject


def record(name: str, ttft_s: float | None = 0.1, **more: Json) -> JsonObject:
    return {"id": name, "ttft_s": ttft_s, **more}


def names(bodies: list[bytes]) -> list[str]:
    return [orjson.loads(body)["id"] for body in bodies]


def test_the_oldest_record_goes_first() -> None:
    store = TraceStore(max_records=3)
    for number in range(5):
        store.add(record(f"r{number}"), b"")
    assert len(store) == 3
    assert store.get("r1", b"") is None and store.get("r2", b"") is not None
    assert names(store.latest(2, b"")) == ["r4", "r3"]


def test_the_bytes_of_all_records_are_bounded() -> None:
    store = TraceStore(max_bytes=1000)
    for number in range(100):
        store.add(record(f"r{number}", filler="x" * 200), b"")
        assert store.size_bytes <= 1000
    assert 0 < len(store) < 5
    store.add(record("r99", filler="y"), b"")  # in place of the other
    assert store.size_bytes == sum(len(body) for body in store.latest(100, b""))


async def test_ten_thousand_records_of_long_prompts_fit() -> None:
    """Each of a handoff with all the phases, offers and names of blocks that a record can have."""
    trace = RequestTrace()
    trace.record_prompt([bytes([200, number]) * 8 for number in range(256)] * 32, 16)
    trace.record_sent("decode-worker-12")
    worker = "prefill-worker-123456"
    for number in range(2 * MAX_PHASES):
        trace.path.mark("chunk", trace.path.at_s + 1.5 + number / 1000, 2048, worker)
    trace.after = Timeline(trace.path.at_s)
    for number in range(2 * MAX_PHASES):
        trace.after.mark("fetch", trace.after.at_s + 1.5 + number / 1000, 2048, worker)
    trace.offers = [
        FetchedOffer(float(number), number + 0.5, number + 0.75, 8192, 0.75)
        for number in range(MAX_OFFERS)
    ]
    end = RequestEnd("req-" + "f" * 32, "finished", 300.0, 131_072, 16_384, 0, 0, "f" * 32)
    full = trace_record(trace, end, ["slow", "failed", "migrated", "preempted"])
    assert len(full["path"]) == len(full["after"]) == MAX_PHASES
    assert len(orjson.dumps(full)) > 7000
    store = TraceStore()
    for number in range(MAX_RECORDS + 5):
        store.add(full | {"id": f"req-{number:032x}"}, b"")
    assert len(store) == MAX_RECORDS == 10_000


def test_the_slowest_come_first() -> None:
    store = TraceStore()
    for number, seconds in enumerate((0.2, 0.9, 0.1, 0.5)):
        store.add(record(f"r{number}", seconds), b"")
    assert names(store.slowest(3, b"")) == ["r1", "r3", "r0"]


def test_requests_without_an_answer_are_not_slow() -> None:
    store = TraceStore()
    store.add(record("unanswered", None), b"")
    store.add(record("answered", 0.1), b"")
    assert names(store.slowest(3, b"")) == ["answered"]
    assert names(store.latest(3, b"")) == ["answered", "unanswered"]


def test_a_request_of_several_prompts_shows_its_last_one() -> None:
    store = TraceStore()
    for index, seconds in enumerate((0.2, None, 0.9, 0.5)):
        store.add(record(f"mine-{index}", seconds), b"a")
    store.add(record("other-0"), b"a")
    found = store.get("mine", b"a")
    assert found is not None and names([found]) == ["mine-2"]
    assert store.get("mine", b"b") is None and store.get("min", b"a") is None


def test_a_tenant_sees_its_own_requests_alone() -> None:
    store = TraceStore()
    store.add(record("mine", 0.1), b"a")
    store.add(record("theirs", 9.0), b"b")
    assert store.get("theirs", b"a") is None
    assert names(store.slowest(5, b"a")) == names(store.latest(5, b"a")) == ["mine"]


def test_slow_is_above_the_99th_percentile_of_the_last() -> None:
    store = TraceStore()
    assert not any(store.is_slow(1000.0 * number) for number in range(MIN_RECENT - 1))
    store = TraceStore()
    for number in range(1000):
        store.is_slow(0.001 * (number % 100))
    assert not store.is_slow(0.09)
    assert store.is_slow(0.2)


def test_a_stream_that_stalls_is_slow_too() -> None:
    store = TraceStore()
    for _ in range(MIN_RECENT):
        assert not store.is_slow(0.1, 0.02)
    assert store.is_slow(0.1, 0.5)
    assert not store.is_slow(0.1)  # one token: it has no time between two
