"""The benchmark of loading runs on the small model. Judges no speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.models.embedded import embedded_model
from tests.support.benchmark_runs import Measure


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's counters")
def test_it_writes_its_figures(measured: Measure) -> None:
    _, figures, _ = measured("loading", "--rounds=1", "--threads=2")
    seconds = figures["load_s"]["value"], figures["load_one_thread_s"]["value"]
    assert min(seconds) > 0
    assert figures["load_speedup"]["value"] == pytest.approx(seconds[1] / seconds[0])
    stored = (embedded_model() / "model.safetensors").stat().st_size
    assert figures["load_gb_per_s"]["value"] * seconds[0] * 1e9 == pytest.approx(stored)
    assert figures["read_gb_per_s"]["value"] > 0
    assert figures["load_peak_ratio"]["value"] >= 0
    assert figures["rounds"]["value"] == 1
