"""`python -m benchmarks.router_scale`: its stand-ins are linked, placed on and cancelled."""

from __future__ import annotations

from tests.support.benchmark_runs import Measure


def test_a_small_fleet_is_measured(measured: Measure) -> None:
    reported = measured("router_scale")
    assert (
        0 < reported.figures["start_us_p50"]["value"] <= reported.figures["start_us_p99"]["value"]
    )
    assert reported.figures["cancel_us"]["value"] > 0
