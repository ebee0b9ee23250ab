"""`python -m benchmarks.placement`: the TTFT p99 of predicted times against weighted scores."""

from __future__ import annotations

from tests.support.benchmark_runs import Measure
from tests.support.shared_traces import shared_trace


def test_p99_is_lower_at_no_less_goodput(measured: Measure) -> None:
    trace = shared_trace("mooncake/conversation_trace.jsonl")
    reported = measured("placement", f"--trace={trace}", "--requests=1500", timeout_s=600.0)
    assert reported.figures["ttft_p99_ratio_worst"]["value"] < 0.9, reported.printed
    assert reported.figures["ttft_p99_ratio_28_28"]["value"] <= 0.75, reported.printed
    assert reported.figures["goodput_ratio_worst"]["holds"], reported.printed


def test_requests_are_drawn_without_a_trace(measured: Measure) -> None:
    reported = measured("placement", "--drawn", "--requests=60")
    assert "drawn lengths" in reported.printed
    assert 0 < reported.figures["ttft_p99_ratio_worst"]["value"] < 10
