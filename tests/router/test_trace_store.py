"""The store of traces is bounded in number and bytes, and knows which requests are slow."""

from __future__ import annotations

from typing import Any

import orjson

from baton.router.answers.trace_store import MIN_RECENT, TraceStore


def record(name: str, ttft_s: float | None = 0.1, **more: Any) -> dict[str, Any]:
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
    for place, seconds in enumerate((0.2, None, 0.9, 0.5)):
        store.add(record(f"mine-{place}", seconds), b"a")
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
