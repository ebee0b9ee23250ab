"""`python -m benchmarks.controller`: what it measures, of short patterns. They change faster than a
worker's role, so the delay of decisions is judged in whole patterns alone."""

from __future__ import annotations

from collections.abc import Callable

from tests.benchmarks.conftest import Reported
from tests.support.shared_traces import shared_trace


def test_the_controller_decides_and_rarely_reverses(
    measured: Callable[..., Reported],
) -> None:
    trace = shared_trace("mooncake/conversation_trace.jsonl")
    reported = measured("controller", f"--trace={trace}", timeout_s=900.0)
    figures = reported.figures
    assert figures["breaches"]["value"] >= 1
    assert figures["reversals_in_300_s_worst"]["holds"]
    assert figures["saturating_good_share"]["value"] > 0.8
    assert "shifting, good requests by prefill workers" in reported.printed
