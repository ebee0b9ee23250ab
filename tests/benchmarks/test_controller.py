"""`python -m benchmarks.controller`: what it measures, of short patterns. They change faster than a
worker's role, so the delay of decisions is judged in whole patterns alone. The rush, by which the
number of workers is judged, is whole here too."""

from __future__ import annotations

from baton.planner.fleet_size import SizeDecision, SizeStep
from baton.planner.traffic_patterns import Pattern, steady
from baton.simulation.capacity.layout import Objectives
from benchmarks.controller.breach_watch import Breach, BreachWatch
from benchmarks.controller.controller_cases import LLAMA, ControllerCase
from benchmarks.controller.worker_number import BLIND_S, BOUNDS, ask_delays
from tests.support.benchmark_runs import Measure
from tests.support.shared_traces import shared_trace


def test_the_controller_decides_and_rarely_reverses(
    measured: Measure,
) -> None:
    trace = shared_trace("mooncake/conversation_trace.jsonl")
    reported = measured("controller", f"--trace={trace}", timeout_s=900.0)
    figures = reported.figures
    assert figures["breaches"]["value"] >= 1
    assert figures["reversals_in_300_s_worst"]["holds"]
    assert figures["saturating_good_share"]["value"] > 0.8
    assert "shifting, good requests by prefill workers" in reported.printed
    assert figures["ask_breaches"]["value"] >= 1
    for name in ("ask_delay_s_worst", "numbers_outside_bounds", "removed_during_rush",
                 "roles_without_worker_s", "least_after_rush_s"):  # fmt: skip
        assert figures[name]["holds"], reported.printed


def decided(at_s: float, before: int, after: int) -> SizeDecision:
    return SizeDecision(at_s, "grow", "", SizeStep(after, before))


def test_a_breach_is_answered_by_the_first_request_for_more() -> None:
    case = ControllerCase(Pattern("p", 1.0, steady(1.0), 1.0), LLAMA, 5, 2, Objectives(5.0, 0.02))
    breach = Breach("prefill", 200.0)
    watch = BreachWatch(case, found=[breach])
    found: list[tuple[list[SizeDecision], dict[Breach, float]]] = [
        ([decided(204.0, 5, 7), decided(230.0, 7, 9)], {breach: 4.0}),
        ([decided(150.0, 5, 7)], {breach: 0.0}),  # its workers are under way
        ([decided(120.0, 5, 7)], {breach: BLIND_S}),  # they have come
        ([decided(120.0, 5, BOUNDS.most)], {}),  # there may be no more
        ([], {breach: BLIND_S}),
    ]
    for decisions, delays in found:
        assert ask_delays(watch, decisions) == (delays, 0)
    watch.ends[breach] = 230.0  # by a change of roles
    assert ask_delays(watch, []) == ({}, 1)
