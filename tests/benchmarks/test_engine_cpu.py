"""The engine benchmark runs on the small model and writes every figure. Judges no speed."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tests.support.benchmark_runs import Measure

NAMED = {
    "prefill_mfu_1024",
    "decode_mbu_bs1",
    "decode_mbu_bs32_ctx512",
    "decode_step_ratio_bs32_ctx16",
    "host_us_per_step_256",
}


def test_it_writes_its_figures(tmp_path: Path, measured: Measure) -> None:
    peer = tmp_path / "python"
    script = Path(__file__).with_name("scripted_peer.py")
    peer.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{script}" "$@"\n')
    peer.chmod(0o755)
    written, figures, printed = measured("engine_cpu", "--rounds=1", f"--openvino={peer}")
    assert figures.keys() >= {*NAMED, "deterministic_cost", "decode_step_ratio_bound"}
    assert all("limit" in figures[name]["beside"] for name in NAMED)
    against = {f"{kind}_vs_openvino" for kind in ("prefill", "decode_bs1", "decode_bs32")}
    assert against == {name for name in figures if "_vs_" in name}
    assert all("limit" in figures[name]["beside"] for name in against)
    assert figures.pop("openvino_same_first_token")["beside"] == "of 8"
    assert all(figure["value"] > 0 for figure in figures.values())
    ran, left_out = written["notes"]
    assert ran == "openvino: kv bf16, threads 2, sequences 1, inherited none"
    assert left_out.startswith("*_vs_vllm left out: give --vllm PYTHON")
    assert left_out in printed
    assert figures["rounds"]["value"] == 1
    parts = sum(figures[f"host_{part}_us"]["value"] for part in ("plan", "prepare", "commit"))
    assert parts == pytest.approx(figures["host_us_per_step_256"]["value"])
    assert "benchmarks.engine_cpu" in written["command"]


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.engine.spec.model_spec import read_spec
    from baton.models.embedded import embedded_model
    from benchmarks.engine_cpu import decode_bytes, least_step_s, matrix_elements, prefill_flops

    spec = read_spec(embedded_model())  # 6 layers, 256 wide, 8/4 heads of 32, FFN 640
    layer = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 640
    assert matrix_elements(spec) == 6 * layer
    head = spec.vocab_size * 256
    assert prefill_flops(spec, 1) == 2 * 6 * layer + 2 * head + 4 * 6 * 256
    assert decode_bytes(spec, 3, 5) == 2 * (6 * layer + head) + 3 * 5 * 6 * 2 * 128 * 2
    weights = 6 * layer + head
    reading = least_step_s(spec, 3, 5, flops_s=1e30, bytes_s=2.0)
    assert reading == decode_bytes(spec, 3, 5) / 2
    computing = least_step_s(spec, 3, 5, flops_s=1.0, bytes_s=1e30)
    assert computing == 2 * 3 * weights


def test_a_refused_setting_leaves_the_other_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from baton.runtime.errors import ConfigError
    from benchmarks import engine_cpu

    def refuse(*_given: object, **_named: object) -> None:
        raise ConfigError("worker.deterministic: on this machine rows depend on each other")

    monkeypatch.setattr(engine_cpu, "build_runner", refuse)
    runner, notes = engine_cpu.deterministic_runner(tmp_path, 8)
    assert runner is None and notes[0].startswith("deterministic_cost left out: worker.determin")
    names = [field.name for field in fields(engine_cpu.EngineTimes)]
    rounds = engine_cpu.EngineTimes(**{name: [1.0] for name in names if name != "strict"})
    found = {figure.name for figure in engine_cpu.figures(rounds, threads=2)}
    assert "deterministic_cost" not in found and found >= NAMED
