"""The fleet that traces are measured against keeps none; the other one does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from benchmarks.fleets.routed_workers import RoutedModelWorkers, RoutedWorkers
from benchmarks.trace_cost import UNTRACED, WORKERS, LoadedFleet

MakeFleet = Callable[[tuple[str, ...]], RoutedWorkers]


@pytest.mark.parametrize(
    "make",
    [lambda entry: RoutedWorkers(WORKERS, entry=entry), RoutedModelWorkers],
    ids=["hash", "model"],
)
@pytest.mark.parametrize(("entry", "kept"), [((), True), (UNTRACED, False)])
def test_only_an_untraced_fleet_keeps_no_trace(
    make: MakeFleet, entry: tuple[str, ...], kept: bool
) -> None:
    workers = make(entry)
    try:
        fleet = LoadedFleet(workers, clients=1, tokens=4)
        done = asyncio.run(fleet.run(0.5))
        assert done.requests_per_s > 0 and done.cpu_s > 0
        found = httpx.get(f"{fleet.url}/traces").json()["traces"]
        assert bool(found) is kept
        assert all({"chunk", "write"} <= {row[0] for row in each["path"]} for each in found)
    finally:
        workers.close()
