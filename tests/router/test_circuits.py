"""Circuits: what opens them, how many are passed over at most, and the way back."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.fleet import circuits as circuits_module
from baton.router.fleet.circuits import (
    MAX_OPEN_S,
    OPEN_S,
    PROBE_TIMEOUT_S,
    SLOW_FOR_S,
    STRIKES,
    Circuits,
)
from tests.support.router_books import open_again


def boot(number: int) -> bytes:
    return bytes([number])


FLEET = {boot(number): "decode" for number in range(6)}
A, B, C = boot(0), boot(1), boot(2)


def opened(boot_id: bytes = A, now_s: float = 0.0) -> Circuits:
    circuits = Circuits(random.Random(1))
    for _ in range(int(STRIKES)):
        circuits.record_failure(boot_id, now_s)
    return circuits


def test_five_failures_open_a_circuit_for_a_while() -> None:
    circuits = Circuits(random.Random(1))
    for _ in range(int(STRIKES) - 1):
        circuits.record_failure(A, 0.0)
    assert circuits.passed_over(FLEET, 0.0) == frozenset()
    circuits.record_failure(A, 0.0)
    assert circuits.passed_over(FLEET, 0.0) == {A}
    assert circuits.passed_over(FLEET, OPEN_S - 0.1) == {A}
    assert circuits.passed_over(FLEET, OPEN_S * 1.2) == frozenset()


def test_what_is_served_outweighs_few_failures_and_not_many() -> None:
    circuits = Circuits(random.Random(1))
    for _ in range(100):  # one in four fails
        circuits.record_failure(A, 0.0)
        for _ in range(3):
            circuits.record_success(A, 0.0)
    assert circuits.passed_over(FLEET, 0.0) == frozenset()
    for _ in range(20):  # every other one does
        circuits.record_failure(A, 0.0)
        circuits.record_success(A, 0.0)
    assert circuits.passed_over(FLEET, 0.0) == {A}


def test_one_request_probes_and_one_success_closes() -> None:
    circuits = opened()
    half_open_s = OPEN_S * 1.2
    circuits.record_placement(A, 1.0)  # a last resort: no probe
    circuits.record_success(A, 1.0)  # placed before it opened
    assert circuits.passed_over(FLEET, 1.0) == {A}
    assert circuits.counts(half_open_s) == {"closed": 0, "open": 0, "half_open": 1}
    circuits.record_placement(A, half_open_s)
    assert circuits.passed_over(FLEET, half_open_s) == {A}  # not a second one
    circuits.record_success(A, half_open_s + 1)
    assert circuits.passed_over(FLEET, half_open_s + 1) == frozenset()
    assert circuits.counts(half_open_s + 1)["closed"] == 1


def test_a_failed_probe_doubles_the_opening_up_to_a_longest() -> None:
    circuits, now_s = opened(), 0.0
    for opening in range(1, 12):
        full_s = min(OPEN_S * 2 ** (opening - 1), MAX_OPEN_S)
        assert circuits.passed_over(FLEET, now_s + full_s - 0.1) == {A}
        now_s += full_s * 1.2
        assert circuits.passed_over(FLEET, now_s) == frozenset()
        circuits.record_placement(A, now_s)
        circuits.record_failure(A, now_s)


def test_one_failure_reopens_on_probation_but_not_after_it() -> None:
    half_open_s = OPEN_S * 1.2
    circuits = opened()
    circuits.record_placement(A, half_open_s)
    circuits.record_success(A, half_open_s)
    circuits.record_failure(A, half_open_s + 1)
    assert circuits.passed_over(FLEET, half_open_s + 1 + 2 * OPEN_S - 0.1) == {A}
    circuits = opened()
    circuits.record_placement(A, half_open_s)
    circuits.record_success(A, half_open_s)
    later_s = half_open_s + OPEN_S * 1.2 + 0.1
    for _ in range(int(STRIKES) - 1):
        circuits.record_failure(A, later_s)
    assert circuits.passed_over(FLEET, later_s) == frozenset()
    circuits.record_failure(A, later_s)
    assert circuits.passed_over(FLEET, later_s + OPEN_S * 1.2) == frozenset()  # short again


def test_a_probe_that_never_ends_makes_way_for_another() -> None:
    circuits = opened()
    half_open_s = OPEN_S * 1.2
    circuits.record_placement(A, half_open_s)
    assert circuits.passed_over(FLEET, half_open_s + PROBE_TIMEOUT_S - 0.1) == {A}
    assert circuits.passed_over(FLEET, half_open_s + PROBE_TIMEOUT_S) == frozenset()
    circuits.record_placement(A, half_open_s + PROBE_TIMEOUT_S)
    assert circuits.passed_over(FLEET, half_open_s + PROBE_TIMEOUT_S + 1) == {A}


def test_a_hang_opens_at_once() -> None:
    circuits = Circuits(random.Random(1))
    circuits.record_hang(A, 0.0)
    circuits.record_hang(A, 1.0)  # it does so still: the time does not begin again
    assert circuits.passed_over(FLEET, OPEN_S - 0.1) == {A}
    assert circuits.passed_over(FLEET, OPEN_S * 1.2) == frozenset()


def compare(circuits: Circuits, slow_ms: float, now_s: float, workers: int = 6) -> None:
    step_ms = {boot(number): 20.0 for number in range(workers)} | {A: slow_ms}
    circuits.compare_steps(step_ms, [A, B], now_s)


def test_a_worker_slower_than_its_peers_for_long_is_passed_over() -> None:
    circuits = Circuits(random.Random(1))
    compare(circuits, 200.0, 0.0)
    compare(circuits, 200.0, SLOW_FOR_S - 0.1)
    assert circuits.passed_over(FLEET, SLOW_FOR_S - 0.1) == frozenset()
    compare(circuits, 200.0, SLOW_FOR_S)
    assert circuits.passed_over(FLEET, SLOW_FOR_S) == {A}
    assert SLOW_FOR_S < 10.0  # what is promised


def test_slow_moments_short_steps_and_idleness_are_no_outliers() -> None:
    circuits = Circuits(random.Random(1))
    for now_s, slow_ms in enumerate((200.0, 200.0, 90.0, 200.0, 200.0, 200.0)):
        compare(circuits, slow_ms, float(now_s))
    for now_s in range(10, 20):
        circuits.compare_steps({A: 15.0, B: 1.0, C: 1.0}, [A, B, C], float(now_s))
        circuits.compare_steps({A: 900.0, B: 20.0, C: 20.0}, [B, C], float(now_s))  # of long ago
    for now_s in range(20, 30):  # two cannot tell who of them is the slow one
        compare(circuits, 900.0, float(now_s), workers=2)
    assert circuits.passed_over(FLEET, 30.0) == frozenset()


@pytest.mark.parametrize(("workers", "most"), [(1, 0), (2, 1), (3, 1), (5, 1), (6, 2), (9, 3)])
def test_at_most_a_third_is_passed_over_and_of_two_that_fail_one(workers: int, most: int) -> None:
    fleet = {boot(number): "decode" for number in range(workers)}
    fleet |= {boot(number): "prefill" for number in range(100, 103)}
    circuits = Circuits(random.Random(1))
    for now, boot_id in enumerate(fleet):
        circuits.record_hang(boot_id, now / 1000)
    found = circuits.passed_over(fleet, 1.0)
    assert found == {boot(number) for number in range(most)} | {boot(100)}


def test_of_two_the_slow_one_stays() -> None:
    circuits = Circuits(random.Random(1))
    for now_s in (0.0, SLOW_FOR_S):
        compare(circuits, 200.0, now_s)
    assert circuits.passed_over(FLEET, SLOW_FOR_S) == {A}
    assert circuits.passed_over({A: "decode", B: "decode"}, SLOW_FOR_S) == frozenset()


def test_another_boot_begins_with_a_clean_record() -> None:
    circuits = opened()
    circuits.forget_others([B])
    assert circuits.passed_over(FLEET, 0.0) == frozenset()
    assert sum(circuits.counts(0.0).values()) == 0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["record_failure", "record_hang", "record_success", "record_placement"]),
        st.integers(0, 5),
        st.floats(0, 4),
    ),
    max_size=150,
)


@given(events=EVENTS, seed=st.integers(0, 99))
def test_two_thirds_always_stay_and_all_workers_return(
    events: list[tuple[str, int, float]], seed: int
) -> None:
    circuits, now_s = Circuits(random.Random(seed)), 0.0
    for event, number, passing_s in events:
        now_s += passing_s
        getattr(circuits, event)(boot(number), now_s)
        assert len(circuits.passed_over(FLEET, now_s)) <= 2
    assert circuits.passed_over(FLEET, now_s + MAX_OPEN_S * 1.2) == frozenset()


def test_a_worker_that_fails_for_ever_is_passed_over_for_ever() -> None:
    circuits, now_s = opened(), 0.0
    for _ in range(1100):  # opened again at each end, as long as a power of two would grow
        open_again(circuits, A, now_s)
        assert circuits.passed_over(FLEET, now_s) == {A}
        now_s += 1.2 * MAX_OPEN_S
    assert circuits.passed_over(FLEET, now_s) == frozenset()


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 2.5, 7.0, 20.0]), min_size=1, max_size=12))
def test_median_of_the_others_is_that_of_a_list_without_one(values: list[float]) -> None:
    known = sorted(ms for ms in values if ms > 0)
    for index, own in enumerate(values):
        others = [ms for other, ms in enumerate(values) if other != index and ms > 0]
        expected = statistics.median(others) if len(others) > 1 else float("inf")
        assert circuits_module.median_without(known, own) == expected
