"""The handoff benchmark runs on the small model and writes every figure. Judges no speed."""

from __future__ import annotations

from tests.support.benchmark_runs import Measure

NAMED = {
    "read_efficiency",
    "handoff_overhead_ms_p50",
    "ttft_ratio_1024",
    "second_token_ratio_1024",
    "unequal_over_equal_ttft",
    "unequal_sizes_over_equal_ttft",
}


def test_it_writes_its_figures(measured: Measure) -> None:
    written, figures, printed = measured(
        "handoff", "--rounds=1", "--unlike-rounds=1", timeout_s=600
    )
    assert figures.keys() >= NAMED
    assert all("limit" in figures[name]["beside"] for name in NAMED)
    assert figures["rounds"]["value"] == 1
    # what no clock may say, however slow the machine is
    assert figures["raw_read_last_ms"]["value"] > 0
    assert 0 < figures["landed_ms"]["value"] <= figures["verified_ms"]["value"]
    assert figures["verified_ms"]["value"] < figures["batched_ms"]["value"]
    assert "benchmarks.handoff" in written["command"]
    assert "read_efficiency" in printed
