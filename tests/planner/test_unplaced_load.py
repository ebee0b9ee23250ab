"""Requests that no worker has: those that wait on a router, or were refused, are load too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.planner.controller_load import FleetLoad, FleetSample, LoadWindow, RouterSample
from tests.support.scripted_fleet import ScriptedFleet, fleet

SECONDS = 10


def load(reported: list[list[RouterSample]], scripted: ScriptedFleet | None = None) -> FleetLoad:
    """Return the load of a fleet whose workers all have this of their routers, a second apart."""
    scripted, window = scripted or fleet(1, 2, rate=4.0), LoadWindow()
    for routers in reported:
        sample = scripted.tick()
        workers = tuple(replace(each, routers=tuple(routers)) for each in sample.workers)
        window.add(FleetSample(sample.at_s, workers))
    return window.load()


def refusing(per_s: int, router: str = "a", before: int = 0) -> list[list[RouterSample]]:
    return [[RouterSample(router, 0, before + per_s * n)] for n in range(SECONDS)]


def test_a_router_counts_once_whatever_workers_it_has() -> None:
    without, reported = load([[]] * SECONDS), load([[RouterSample("a", 7)]] * SECONDS)
    assert reported.waiting == without.waiting + 7
    assert reported.backlog_tokens == pytest.approx(
        without.backlog_tokens + 7 * without.tokens_per_request
    )


def test_refused_requests_are_load() -> None:
    assert load(refusing(3)).requests_per_s == pytest.approx(4.0 + 3.0, rel=0.05)


def test_refusals_count_as_many_as_were_received_at_most() -> None:
    assert load(refusing(1000)).requests_per_s == pytest.approx(2 * 4.0, rel=0.05)


def test_a_router_that_has_just_been_linked_adds_no_old_refusals() -> None:
    reported = [*[[]] * (SECONDS - 1), [RouterSample("b", 0, 1_000_000)]]
    assert load(reported).requests_per_s == pytest.approx(4.0, rel=0.05)


def test_the_latest_report_of_a_router_counts() -> None:
    scripted = fleet(0, 2)
    one, other = scripted.tick().workers
    old, new = RouterSample("a", 9, 5), RouterSample("a", 2, 8)
    sample = FleetSample(0.0, (replace(one, routers=(new,)), replace(other, routers=(old,))))
    assert sample.routers() == {"a": new}
