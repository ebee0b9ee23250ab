"""The benchmark of start-up starts real fleets of two checkouts. Judges no speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.start_time.serve_start import measured_start
from tests.support.benchmark_runs import Measure

ROOT = Path(__file__).resolve().parents[2]


def test_it_compares_two_checkouts(measured: Measure, tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.symlink_to(ROOT)
    _, figures, _ = measured("start_time", "--rounds=1", f"--before={before}", timeout_s=400)
    seconds = figures["start_s"]["value"], figures["start_before_s"]["value"]
    assert min(seconds) > 0
    assert figures["start_ratio"]["value"] == pytest.approx(seconds[0] / seconds[1])
    cpu_s = figures["cpu_s"]["value"], figures["cpu_before_s"]["value"]
    assert min(cpu_s) > 1.0  # two workers import torch
    assert figures["cpu_ratio"]["value"] == pytest.approx(cpu_s[0] / cpu_s[1])
    assert "at most 1.05; " in figures["cpu_ratio"]["beside"]  # and the range of the rounds


def checkout_of(folder: Path) -> Path:
    """Return a checkout whose program ends at once."""
    program = folder / "deploy" / "cli" / "main.py"
    program.parent.mkdir(parents=True)
    project = '[tool.setuptools]\npackages = ["baton.deploy.cli"]\n'
    (folder / "pyproject.toml").write_text(project)
    program.write_text("raise SystemExit('the program of this checkout')")
    return folder


def test_the_code_that_starts_is_the_checkouts_own(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the program of this checkout"):
        measured_start(checkout_of(tmp_path))


def test_a_checkouts_links_outlive_the_one_that_named_it(tmp_path: Path) -> None:
    """Also if an earlier version of the benchmark has made them."""
    checkout, name = checkout_of(tmp_path / "real"), tmp_path / "before"
    link = checkout / "build" / "start_time" / "baton" / "deploy"
    link.parent.mkdir(parents=True)
    link.symlink_to(name / "deploy")
    name.symlink_to(checkout)
    with pytest.raises(RuntimeError, match="the program of this checkout"):
        measured_start(name)
    name.unlink()
    assert (link / "cli" / "main.py").exists()
