"""A worker that joins late gets a growing share, and what no other can take."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.router.fleet.placement import FleetView, PlacementInput, open_groups, place
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.request_need import Need
from baton.router.fleet.roster import Roster
from baton.router.fleet.slow_start import (
    CATCH_UP_S,
    FIRST_SHARE,
    LAST_SHARE,
    RAMP_S,
    TOGETHER_S,
    SlowStart,
    growing_share,
)
from baton.router.fleet.worker_view import WorkerView
from tests.support.fleet_scene import FleetScene
from tests.support.placement_scene import NEED, view
from tests.support.waiting import eventually

NEW = "decode-9"
JOINED_S = 100.0
MAX_WAITING = 512


class Fleet:
    """Decode workers `decode-0` and so on of the same age, all of them loaded; requests never end.
    A new worker joins at JOINED_S."""

    def __init__(self, loaded: int, running: int = 5000, **fields: object) -> None:
        self.roster, self.slow_start = Roster(MAX_WAITING), SlowStart()
        for number in range(loaded):
            self.put(view(f"decode-{number}", running=running, **fields))

    def put(self, worker: WorkerView) -> None:
        self.roster.put(worker)
        self.slow_start.follow(worker)

    def join(self, name: str, now_s: float = JOINED_S, boot: bytes = b"new") -> None:
        self.put(replace(view(name), boot_id=boot, joined_s=now_s))

    def place(self, now_s: float, need: Need = NEED) -> str:
        deferred = self.slow_start.deferred(self.roster, now_s)
        fleet = FleetView(self.roster, deferred=deferred)
        groups = open_groups(need, fleet)
        given = PlacementInput(need, fleet, groups, lambda kv_format: Holders(), "local")
        found = place(given).decode
        self.slow_start.record_placement(found.worker_id, "decode", self.roster, now_s)
        self.put(replace(found, running=found.running + 1))
        return found.worker_id

    def shares(self, name: str, per_s: int, seconds: int) -> list[float]:
        """Return the worker's share of the placements of each second, as parts of a fair share."""
        found = []
        for second in range(seconds):
            times = [JOINED_S + second + turn / per_s for turn in range(per_s)]
            got = [self.place(now_s) for now_s in times].count(name)
            found.append(got / per_s * len(self.roster.views()))
        return found


@pytest.mark.parametrize("loaded", [1, 3, 7])
def test_new_workers_share_grows_and_is_fair_in_ten_seconds(loaded: int) -> None:
    fleet = Fleet(loaded)
    fleet.join(NEW)
    shares = fleet.shares(NEW, per_s=80, seconds=14)
    slack = 2 * (loaded + 1) / 80  # two placements of a second
    for second, share in enumerate(shares):
        assert share <= growing_share(second + 1) + slack, shares
        assert share >= growing_share(second) - slack, shares
    assert shares[0] < 0.4 and min(shares[8:]) >= 1.0
    assert max(shares) <= LAST_SHARE + slack  # not all, though it is empty


def test_a_backlog_that_comes_at_once_goes_to_the_loaded_workers() -> None:
    fleet = Fleet(3)
    fleet.join(NEW)
    placed = [fleet.place(JOINED_S) for _ in range(200)]
    assert 1 <= placed.count(NEW) <= 1 + 200 * FIRST_SHARE / 4 + 1
    assert {placed.count(f"decode-{number}") for number in range(3)} <= {64, 65, 66}


def test_without_slow_start_it_gets_the_whole_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowStart, "deferred", lambda *_: frozenset())
    fleet = Fleet(3)
    fleet.join(NEW)
    assert {fleet.place(JOINED_S) for _ in range(200)} == {NEW}


def test_restarted_worker_starts_again_and_resumed_link_not() -> None:
    fleet = Fleet(3)
    fleet.join(NEW)
    fleet.join("decode-0", JOINED_S + 50.0, boot=b"second")
    late_s = JOINED_S + CATCH_UP_S
    placed = [fleet.place(late_s - 9.9) for _ in range(100)]
    assert placed.count("decode-0") <= 5
    fleet.slow_start.deferred(fleet.roster, late_s)  # by now the first one is over
    fleet.slow_start.follow(replace(view(NEW), boot_id=b"new", joined_s=JOINED_S))
    assert fleet.slow_start.counts(late_s) == {"prefill": 0, "decode": 1}


def test_a_worker_that_takes_on_a_role_starts_in_it() -> None:
    fleet = Fleet(2)
    prefill = view("prefill-0", queued_tokens=10_000)
    fleet.put(prefill)
    fleet.put(replace(view("decode-1"), role="prefill", joined_s=JOINED_S))
    deferred, took = [], []
    for _ in range(40):
        over = fleet.slow_start.deferred(fleet.roster, JOINED_S)
        deferred.append(over)
        took.append("decode-1" if not over else "prefill-0")
        fleet.slow_start.record_placement(took[-1], "prefill", fleet.roster, JOINED_S)
    assert took.count("decode-1") <= 1 + 40 * FIRST_SHARE / 2
    assert {over for over in deferred if over} == {frozenset({b"decode-1"})}


def test_deferred_prefill_worker_comes_after_the_others() -> None:
    roster = Roster()
    workers = [
        view("decode-0"),
        view("prefill-0", queued_tokens=90_000),
        view("prefill-1"),
        view("prefill-2"),
    ]
    for worker in workers:
        roster.put(worker)
    fleet = FleetView(roster, deferred=frozenset({b"prefill-1"}))
    groups = open_groups(NEED, fleet)
    need = replace(NEED, avoid=frozenset({b"prefill-2"}))
    given = PlacementInput(need, fleet, groups, lambda kv_format: Holders(), "disaggregated")
    found = place(given)
    assert [e.worker_id for e in found.candidates] == ["prefill-0", "prefill-1", "prefill-2"]


@pytest.mark.parametrize(
    "others", [{"draining": True}, {"waiting": MAX_WAITING}, {"total_blocks": 8}]
)
def test_what_only_the_new_worker_can_take_it_gets(others: dict[str, int]) -> None:
    fleet = Fleet(3, **others)
    fleet.join(NEW)
    assert {fleet.place(JOINED_S) for _ in range(100)} == {NEW}


@pytest.mark.parametrize("apart_s", [0.0, TOGETHER_S])
def test_workers_that_join_together_share_from_the_first(apart_s: float) -> None:
    fleet = Fleet(0)
    fleet.join("decode-1")
    fleet.join("decode-2", JOINED_S + apart_s)
    placed = [fleet.place(JOINED_S + apart_s) for _ in range(100)]
    assert placed.count("decode-1") == placed.count("decode-2") == 50


def test_it_ends_once_the_worker_is_as_loaded_as_the_others() -> None:
    fleet = Fleet(3, running=20)
    fleet.join(NEW)
    fleet.shares(NEW, per_s=20, seconds=9)
    assert fleet.slow_start.counts(JOINED_S)["decode"] == 1
    fleet.shares(NEW, per_s=20, seconds=30)
    assert fleet.slow_start.counts(JOINED_S)["decode"] == 0


def test_it_ends_in_time_without_placements() -> None:
    fleet = Fleet(3)
    fleet.join(NEW)
    fleet.place(JOINED_S)
    assert fleet.slow_start.deferred(fleet.roster, JOINED_S) == {b"new"}
    assert fleet.slow_start.deferred(fleet.roster, JOINED_S + CATCH_UP_S) == frozenset()


def test_a_quiet_fleet_counts_no_worker_as_starting_for_ever() -> None:
    """Nothing is placed, so nothing else looks at the time."""
    fleet = Fleet(3)
    fleet.join(NEW)
    assert fleet.slow_start.counts(JOINED_S + CATCH_UP_S - 0.1) == {"prefill": 0, "decode": 1}
    assert fleet.slow_start.counts(JOINED_S + CATCH_UP_S) == {"prefill": 0, "decode": 0}


def test_waiting_requests_get_a_new_workers_room_over_the_ramp() -> None:
    """The other workers' queues are full: it would get all that waits in the router at once."""
    fleet = Fleet(3, waiting=MAX_WAITING)
    fleet.join(NEW)

    def room(now_s: float) -> int:
        return fleet.roster.room - fleet.slow_start.withheld_room(fleet.roster, MAX_WAITING, now_s)

    assert fleet.roster.room == MAX_WAITING
    assert room(JOINED_S) == 1
    assert room(JOINED_S + RAMP_S / 2) == MAX_WAITING / 2
    assert room(JOINED_S + RAMP_S) == MAX_WAITING
    fleet.put(replace(view(NEW), waiting=200, boot_id=b"new", joined_s=JOINED_S))
    assert room(JOINED_S) == 0
    assert room(JOINED_S + RAMP_S / 2) == MAX_WAITING / 2 - 200
    for number in range(3):
        fleet.roster.remove(f"decode-{number}")
    assert room(JOINED_S) == fleet.roster.room


async def test_fleet_limits_a_worker_that_joins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.fleet.slow_start.TOGETHER_S", 0.05)
    scene = FleetScene()
    try:
        scene.add("decode-0")
        await eventually(lambda: scene.names() == ["decode-0"])
        # A worker that joins after `TOGETHER_S` is later than the others.
        await asyncio.sleep(0.06)
        stub = scene.add("decode-1", number=2)
        await eventually(lambda: scene.names() == ["decode-0", "decode-1"])
        now_s = asyncio.get_running_loop().time()
        assert scene.fleet.slow_start.counts(now_s)["decode"] == 1
        assert scene.fleet.deferred() == frozenset()  # the first request is its own
        roster = scene.fleet.roster()
        scene.fleet.slow_start.record_placement("decode-1", "decode", roster, 0.0)
        assert scene.fleet.deferred() == {stub.boot_id}
        assert scene.fleet.room() < roster.room
    finally:
        await scene.end()
