"""The benchmark of the deterministic mode runs on the small model. Judges no speed."""

from __future__ import annotations

from tests.support.benchmark_runs import Measure

STEPS = ("prefill_1024", "decode_bs32", "decode_bs1")


def test_it_writes_its_figures(measured: Measure) -> None:
    written, figures, _ = measured("deterministic", "--rounds=1")
    for step in STEPS:
        assert figures[f"deterministic_cost_{step}"]["value"] > 0
        assert figures[f"deterministic_cpu_cost_{step}"]["value"] > 0
        assert " over " in figures[f"deterministic_cost_{step}"]["beside"]
    assert figures["rounds"]["value"] == 1
    assert "benchmarks.deterministic" in written["command"]
