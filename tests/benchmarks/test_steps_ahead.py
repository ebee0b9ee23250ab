"""The comparison of one step at a time with a step planned ahead, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import steps_ahead


def test_each_way_of_each_batch_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in steps_ahead.SPIN.items():
        monkeypatch.setenv(name, value)
    ways: list[str] = []
    original = steps_ahead.working
    monkeypatch.setattr(
        steps_ahead, "working", lambda engine, way: ways.append(way) or original(engine, way)
    )
    lead_s = steps_ahead.step_pipeline.LEAD_S
    result = tmp_path / "figures.json"
    sizes = ["--batches", "1", "3", "--rounds", "1", "--tokens", "8", "--arrivals", "1"]
    steps_ahead.main(["--quick", *sizes, "--json", str(result)])
    found = {f["name"]: f["value"] for f in json.loads(result.read_text())["figures"]}
    names = ("tokens_per_s", "itl_ms", "itl_p99_ms", "arrival_ms")
    assert set(found) == {
        f"{n}_{b}_{way}" for n in names for b in (1, 3) for way in steps_ahead.WAYS
    }
    assert all(value > 0 for value in found.values())
    assert [ways.count(way) for way in steps_ahead.WAYS] == [5, 4, 4]  # the first to warm up
    assert lead_s == steps_ahead.step_pipeline.LEAD_S
