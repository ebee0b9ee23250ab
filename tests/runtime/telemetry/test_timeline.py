"""A timeline's phases add up, whatever is marked, inserted or claimed."""

from __future__ import annotations

import random

import pytest

from baton.proto import worker_pb2
from baton.runtime.telemetry.timeline import MAX_PHASES, Phase, Timeline, micros, read, write


def test_phases_follow_each_other_without_a_gap() -> None:
    made = Timeline(10.0)
    made.mark("credit wait", 10.5)
    made.mark("chunk", 12.0, count=64)
    made.mark("chunk", 13.0, count=32)
    rows = [(p.name, p.seconds, p.count) for p in made.phases]
    assert rows == [("credit wait", 0.5, 0), ("chunk", 1.5, 64), ("chunk", 1.0, 32)]
    assert made.seconds == 3.0


def test_a_phase_that_was_over_before_lasts_no_time() -> None:
    made = Timeline(10.0)
    made.mark("chunk", 12.0, count=1)
    made.mark("fetch", 11.0, count=4)
    assert made.phases[-1].seconds == 0 and made.seconds == 2.0


def test_equal_phases_without_a_count_become_one() -> None:
    made = Timeline(0.0)
    for at_s in (1.0, 2.0, 4.0):
        made.mark("lost handoff", at_s)
    assert made.phases == [Phase("lost handoff", 4.0)]


def test_what_another_process_leaves_over_went_to_messages() -> None:
    made = Timeline(0.0)
    theirs = [Phase("credit wait", 0.25), Phase("chunk", 0.5, 7, "p")]
    half_s = made.insert(theirs, 1.0, before="send", after="return")
    assert [(p.name, p.seconds) for p in made.phases] == [
        ("send", 0.125), ("credit wait", 0.25), ("chunk", 0.5), ("return", 0.125)
    ]  # fmt: skip
    assert half_s == 0.125 and made.seconds == 1.0


def test_claims_of_more_time_than_there_was_are_shortened() -> None:
    made = Timeline(0.0)
    made.insert([Phase("chunk", 6.0, 1), Phase("first token", 2.0)], 1.0, "send", "return")
    assert [p.seconds for p in made.phases] == [0.0, 0.75, 0.25, 0.0]
    assert made.seconds == 1.0


def test_the_sum_holds_beyond_the_bound_of_phases() -> None:
    rng, made, at_s = random.Random(5), Timeline(3.0), 3.0
    for _ in range(500):
        at_s += rng.random()
        made.mark("step wait", at_s)
        at_s += rng.random()
        made.mark("chunk", at_s, count=16)
    assert len(made.phases) == MAX_PHASES
    assert sum(p.seconds for p in made.phases) == pytest.approx(at_s - 3.0)
    assert sum(p.count for p in made.phases) == 500 * 16


def test_what_follows_a_prompt_of_many_chunks_keeps_its_name() -> None:
    """Only the repeated phases share a bound: the answer's time is not the last chunk's."""
    made = Timeline(0.0)
    made.mark("place", 1.0)
    for number in range(100):
        made.mark("step wait", 2.0 + number, 0, "decode-0")
        made.mark("chunk", 2.5 + number, 128, "decode-0")
    made.mark("first token", 102.0, 0, "decode-0")
    made.mark("decode", 150.0, 0, "decode-0")
    made.mark("write", 151.0)
    assert len(made.phases) == MAX_PHASES
    assert [(p.name, p.seconds) for p in made.phases[-3:]] == [
        ("first token", 0.5), ("decode", 48.0), ("write", 1.0)
    ]  # fmt: skip
    assert made.phases[0] == Phase("place", 1.0)
    chunks = [p for p in made.phases if p.name == "chunk"]
    assert sum(p.seconds for p in chunks) == 50.0 and sum(p.count for p in chunks) == 12_800


def test_the_sum_holds_without_any_phases_alike() -> None:
    """As after many migrations, each to another worker."""
    made = Timeline(0.0)
    for number in range(100):
        made.mark("decode", number + 1.0, 0, f"decode-{number}")
    assert len(made.phases) == MAX_PHASES
    assert sum(p.seconds for p in made.phases) == 100.0


def test_a_timeline_survives_the_wire() -> None:
    made = Timeline(0.0)
    made.mark("connect", 0.001)
    made.insert([Phase("prefill queue", 0.01, 0, "prefill-1")], 0.02, "open", "first token")
    message = worker_pb2.Timeline()
    write(made, message)
    message.ParseFromString(message.SerializeToString())
    came = read(message, "decode-1")
    assert [(p.name, micros(p.seconds), p.where) for p in came] == [
        ("connect", 1000, "decode-1"),
        ("open", 4500, "decode-1"),
        ("prefill queue", 10000, "prefill-1"),
        ("first token", 4500, "decode-1"),
    ]


@pytest.mark.parametrize(
    "message",
    [
        worker_pb2.Timeline(names=[6], micros=[1, 2], counts=[0]),
        worker_pb2.Timeline(names=[6] * 65, micros=[1] * 65, counts=[0] * 65),
    ],
)
def test_a_malformed_message_has_no_phases(message: worker_pb2.Timeline) -> None:
    assert read(message, "w") == []


def test_an_unknown_phase_and_a_bad_range_do_no_harm() -> None:
    message = worker_pb2.Timeline(micros=[5], counts=[0], peer_first=9, peer_end=4_000_000_000)
    message.names.append(99)  # type: ignore[arg-type]  # of a newer worker
    assert [p.name for p in read(message, "w")] == ["unknown phase"]
