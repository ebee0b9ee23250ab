"""What other routers report: taken once, forgotten in time, and never more than a hint."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from baton.router.fleet import other_routers
from baton.router.fleet.circuits import STRIKES, SUSPECTED_STRIKES, Circuits
from baton.router.fleet.other_routers import (
    HINT_S,
    LIFETIME_S,
    MAX_AGE_S,
    MAX_HINTED_REQUESTS,
    MAX_HINTED_TOKENS,
    OtherRouters,
)
from baton.router.fleet.placement import FleetView, open_groups
from baton.router.fleet.roster import Roster
from baton.runtime.shared_registry.router_report import RouterReport
from tests.support.placement_scene import NEED, place, view
from tests.support.router_books import remembered_routers

ONE, TWO, OWN = "1" * 32, "2" * 32, "f" * 32
WORKERS = [f"{number:032x}" for number in range(4)]
WALL_NS = 1_700_000_000_000_000_000


def report(router: str = ONE, after_ns: int = 0, **fields: object) -> RouterReport:
    return replace(RouterReport(router, WALL_NS + after_ns), **fields)


@pytest.fixture
def others() -> OtherRouters:
    return OtherRouters(OWN)


def boots(*workers: str) -> frozenset[bytes]:
    return frozenset(bytes.fromhex(worker) for worker in workers)


def test_open_circuits_of_all_routers_are_suspected(others: OtherRouters) -> None:
    assert others.learn(report(open=(WORKERS[0],)), 0.0, WALL_NS)
    assert others.learn(report(TWO, open=(WORKERS[1],)), 0.0, WALL_NS)
    assert others.suspected() == boots(WORKERS[0], WORKERS[1])
    assert others.learn(report(after_ns=1), 0.1, WALL_NS)  # that router has closed it
    assert others.suspected() == boots(WORKERS[1])


def test_copy_of_a_report_does_not_count(others: OtherRouters) -> None:
    first = report(open=(WORKERS[0],))
    assert others.learn(first, 0.0, WALL_NS)
    assert others.learn(report(after_ns=5), 1.0, WALL_NS)
    assert not others.learn(first, 2.0, WALL_NS)
    assert not others.learn(report(after_ns=5, open=(WORKERS[0],)), 2.0, WALL_NS)
    assert others.suspected() == frozenset()


def test_copy_does_not_bring_a_forgotten_router_back(others: OtherRouters) -> None:
    assert others.learn(report(open=(WORKERS[0],)), 0.0, WALL_NS)
    others.expire(LIFETIME_S)
    assert len(others) == 1
    others.expire(LIFETIME_S + 0.1)
    assert len(others) == 0 and others.suspected() == frozenset()
    assert not others.learn(report(open=(WORKERS[0],)), LIFETIME_S + 0.2, WALL_NS)
    assert others.learn(report(after_ns=1), LIFETIME_S + 0.3, WALL_NS)


@pytest.mark.parametrize("age_s", [-MAX_AGE_S - 1, MAX_AGE_S + 1])
def test_report_of_another_time_does_not_count(others: OtherRouters, age_s: float) -> None:
    """A copy from long ago, which a router that has just started has not seen yet."""
    assert not others.learn(report(open=(WORKERS[0],)), 0.0, WALL_NS + round(age_s * 1e9))
    assert others.suspected() == frozenset()


def test_own_reports_do_not_count(others: OtherRouters) -> None:
    assert not others.learn(report(OWN, open=(WORKERS[0],)), 0.0, WALL_NS)


def test_routers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_routers, "MAX_ROUTERS", 2)
    monkeypatch.setattr(other_routers, "MAX_FORGOTTEN", 1)
    others = OtherRouters(OWN)
    taken = [others.learn(report(f"{n:032x}"), 0.0, WALL_NS) for n in range(3)]
    assert taken == [True, True, False]
    others.expire(LIFETIME_S + 1)
    assert remembered_routers(others) == 1


def test_hints_add_up_to_a_bound_and_end_after_a_second(others: OtherRouters) -> None:
    assert others.learn(report(placed=((WORKERS[0], 3, 100),)), 0.0, WALL_NS)
    assert others.learn(report(TWO, placed=((WORKERS[0], 4, 50),)), 0.5, WALL_NS)
    (worker,) = boots(WORKERS[0])
    assert others.placed(0.6) == {worker: (7, 150)}
    assert others.placed(HINT_S + 0.1) == {worker: (4, 50)}
    assert others.placed(2.0) == {}
    huge = report(after_ns=1, placed=((WORKERS[0], 1 << 30, 1 << 30),))
    assert others.learn(huge, 3.0, WALL_NS)
    assert others.placed(3.0) == {worker: (MAX_HINTED_REQUESTS, MAX_HINTED_TOKENS)}


def test_suspected_worker_needs_two_failures_instead_of_five() -> None:
    counts = {}
    for suspected in (frozenset[bytes](), frozenset({b"w"})):
        circuits = Circuits(random.Random(1))
        circuits.suspected = suspected
        failures = 0
        while not circuits.failing():
            circuits.record_failure(b"w", 0.0)
            failures += 1
        counts[bool(suspected)] = failures
    assert counts == {False: STRIKES, True: SUSPECTED_STRIKES}


def test_a_lie_takes_no_healthy_worker_away() -> None:
    """A router that says so of all workers, for ever: one failure in four is still served."""
    workers = [f"decode-{number}".encode() for number in range(3)]
    fleet = dict.fromkeys(workers, "decode")
    circuits = Circuits(random.Random(1))
    circuits.suspected = frozenset(workers)
    for second in range(1000):
        for worker in workers:
            (circuits.record_failure if second % 4 == 0 else circuits.record_success)(
                worker, float(second)
            )
        assert circuits.passed_over(fleet, float(second)) == frozenset()
    assert circuits.counts(1000.0)["closed"] == 3


def test_end_of_a_suspicion_closes_no_circuit() -> None:
    circuits = Circuits(random.Random(1))
    for _ in range(int(STRIKES)):
        circuits.record_failure(b"w", 0.0)
    circuits.suspected = frozenset({b"w"})
    circuits.suspected = frozenset()
    assert circuits.failing() == [b"w"]


def test_hints_change_the_order_and_fill_no_queue() -> None:
    most = (MAX_HINTED_REQUESTS, MAX_HINTED_TOKENS)
    workers = [
        view("decode-0", hinted=(1, 100)),
        view("decode-1"),
        view("prefill-0", hinted=(1, 100)),
        view("prefill-1"),
    ]
    found = place(NEED, workers, "disaggregated")
    assert found.decode.worker_id == "decode-1"
    assert [e.worker_id for e in found.candidates] == ["prefill-1", "prefill-0"]
    roster = Roster(max_waiting=4)
    for name in ("decode-0", "decode-1"):
        roster.put(view(name, hinted=most))
    (group,) = open_groups(NEED, FleetView(roster))
    assert len(group.open) == 2 and roster.room == 8
