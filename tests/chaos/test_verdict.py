"""What runs are judged by: outcomes, what is left, and the seconds to recover."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from chaos.answers import Choice
from chaos.asks import Kind
from chaos.clients import Outcome, Trace
from chaos.verdict import LEAST_BEFORE, Moments, judge, recovery

MOMENTS = Moments(began_s=0.0, fault_s=4.0, over_s=14.0)
STEP_S = 0.02


def stream(
    start_s: float, stalls: tuple[tuple[float, float], ...] = (), *, until_s: float
) -> Trace:
    """A token each STEP_S, none during a stall (from, until)."""
    trace, now_s = Trace(0, start_s, router="router", tries=1, outcome=Outcome.RIGHT), start_s
    choice = trace.answer.choices[0] = Choice()
    while now_s < until_s:
        for begin_s, end_s in stalls:
            if begin_s <= now_s < end_s:
                now_s = end_s
        choice.tokens.append("a")
        choice.token_s.append(now_s)
        now_s += STEP_S
    trace.ended_s = now_s
    return trace


def streams(*stalls: tuple[float, float]) -> list[Trace]:
    return [stream(0.005 * n, stalls, until_s=14.0) for n in range(4)]


def short(count: int, outcome: Outcome = Outcome.RIGHT, router: str = "router") -> list[Trace]:
    """Answered before the fault."""
    return [
        Trace(n, 1.0, router=router, tries=1, ended_s=2.0, outcome=outcome) for n in range(count)
    ]


def test_no_fault_needs_no_recovery() -> None:
    found = recovery(streams(), MOMENTS)
    assert (found.seconds, found.disturbed_s) == (0.0, 0.0)


@pytest.mark.parametrize(("until_s", "seconds"), [(5.4, 1.5), (6.2, 2.5), (9.9, 6.0)])
def test_a_stall_lasts_until_its_end_is_seen(until_s: float, seconds: float) -> None:
    found = recovery(streams((4.0, until_s)), MOMENTS)
    assert found.seconds == found.disturbed_s == seconds


def test_a_later_pause_is_reported_as_disturbance() -> None:
    found = recovery(streams((9.1, 9.9)), MOMENTS)
    assert found.seconds == 0.0
    assert found.disturbed_s == 1.0


def test_what_never_comes_back_is_never() -> None:
    found = recovery(streams((4.0, 99.0)), MOMENTS)
    assert found.seconds is None
    assert found.disturbed_s == 10.0


def test_slower_tokens_are_no_recovery_even_if_all_come() -> None:
    """Half the streams die at the fault: no client waits, yet goodput is half."""
    kept, lost = streams()[:2], [stream(0.01 * n, until_s=4.0) for n in range(2)]
    assert recovery(kept + lost, MOMENTS).seconds is None


def test_one_slow_stream_of_many_is_within_the_99th_percentile() -> None:
    many = [stream(0.001 * n, until_s=14.0) for n in range(30)]
    slow = [stream(0.0, ((4.0, 4.9),), until_s=14.0)]
    assert recovery(many + slow, MOMENTS).seconds == 0.0


def test_waits_are_of_each_choice_by_itself() -> None:
    """One that stands still is seen beside another that goes on."""
    found = streams()
    for trace in found:
        still = stream(trace.started_s, ((4.0, 9.0),), until_s=14.0)
        trace.answer.choices[1] = still.answer.choices[0]
    assert recovery(found, MOMENTS).disturbed_s >= 5.0


def test_an_answer_in_one_piece_has_no_waits() -> None:
    whole = Trace(0, 3.0, Kind.WHOLE, outcome=Outcome.RIGHT, ended_s=9.0)
    whole.answer.choices[0] = Choice(["a"] * 40)
    assert recovery([*streams(), whole], MOMENTS) == recovery(streams(), MOMENTS)


def verdict(traces: list[Trace], *, redundant: bool = True, left: dict[str, int] | None = None):
    return judge(
        "x", 0, streams() + traces, MOMENTS, left or {}, redundant=redundant, may_cut=("router-1",)
    )


@pytest.mark.parametrize(
    ("outcome", "redundant", "kept"),
    [
        (Outcome.RIGHT, True, True), (Outcome.LEFT, True, True),
        (Outcome.FAILED, True, False), (Outcome.REFUSED, True, False),
        (Outcome.FAILED, False, True), (Outcome.REFUSED, False, True),
        (Outcome.WRONG, True, False), (Outcome.WRONG, False, False),
        (Outcome.HUNG, True, False), (Outcome.HUNG, False, False),
        (Outcome.CUT, True, False), (Outcome.CUT, False, False),
        (None, False, False),
    ],
)  # fmt: skip
def test_what_breaks_a_promise(outcome: Outcome | None, redundant: bool, kept: bool) -> None:
    odd = short(1)
    odd[0].outcome, odd[0].detail = outcome, "why"
    found = verdict(short(LEAST_BEFORE) + odd, redundant=redundant)
    assert not found.void
    assert (found.broken == []) is kept
    assert kept or "(greedy) on router" in found.broken[0] and "why" in found.broken[0]


def test_a_stream_may_be_cut_by_the_router_that_was_killed_alone() -> None:
    assert verdict(short(LEAST_BEFORE) + short(2, Outcome.CUT, "router-1")).broken == []
    assert len(verdict(short(LEAST_BEFORE) + short(2, Outcome.CUT)).broken) == 2


def test_blocks_that_are_left_break_it() -> None:
    (reported,) = verdict(short(LEAST_BEFORE), left={"decode-0": 3}).broken
    assert reported == "decode-0 holds 3 blocks"


def test_too_little_load_makes_it_void() -> None:
    assert "too little load" in verdict(short(LEAST_BEFORE - 1)).void
    assert judge("x", 0, short(9), MOMENTS, {}, redundant=True).void  # no request was under way


def test_requests_are_counted_by_outcome_and_retries_apart() -> None:
    more = short(LEAST_BEFORE) + short(2, Outcome.FAILED)
    more[0].tries = 2
    more[1].by_grpc = True
    more[2].kind = Kind.STOP
    more[-1].detail = "503 no worker"
    found = verdict(more)
    assert found.counts["failed"] == 2 and found.counts["right"] == LEAST_BEFORE + 4
    assert found.requests == LEAST_BEFORE + 6 and found.retried == found.by_grpc == 1
    assert found.kinds == {"greedy": LEAST_BEFORE + 5, "stop": 1}
    assert found.errors == {"": 1, "503 no worker": 1}
    assert json.loads(json.dumps(asdict(found)))["errors"] == found.errors
