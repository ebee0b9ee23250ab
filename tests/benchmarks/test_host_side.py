"""The stand-in for a decode worker's host side: the real scheduler, at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.figures import ceilings, host_side
from benchmarks.inputs import cached_model


def test_every_sequence_is_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_side, "PROMPT_TOKENS", 20)
    monkeypatch.setattr(host_side, "OUTPUT_TOKENS", 40)
    host = host_side.HostSide(5)
    assert host.scheduler.running == 5
    batches = []
    original = host_side.prepare
    monkeypatch.setattr(
        host_side, "prepare", lambda batch, bounds: batches.append(batch) or original(batch, bounds)
    )
    times = [host.step() for _ in range(15)]  # past the end of a block
    assert [len(batch.slices) for batch in batches] == [5] * 15
    starts = [[item.start for item in batch.slices] for batch in batches]
    assert starts == [[20 + step] * 5 for step in range(15)]
    assert all(min(t.plan_s, t.prepare_s, t.commit_s) > 0 for t in times)
    assert times[0].total_s == times[0].plan_s + times[0].prepare_s + times[0].commit_s
    host.pool.check()
    assert host.scheduler.preemptions == 0


def test_ceilings_are_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "_SHAPES", ((8, 16, 32), (4, 4, 4)))
    measured = ceilings.Ceilings()
    assert measured.words.sum() == (1 << 20) // 8  # nothing is read from a shared zero page
    monkeypatch.setattr(ceilings, "seconds", lambda call: call() is None or 0.5)
    assert measured.read_bytes_s() == (1 << 20) / 0.5
    assert measured.linear_flops() == 2 * 8 * 16 * 32 / 0.5
    unit = ceilings.matrix_unit() != ceilings.NO_UNIT
    kind = torch.bfloat16 if unit else torch.float32  # what torch is fast in here
    assert [x.dtype for pair in measured.operands for x in pair] == [kind] * 4


def test_the_faster_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 12.0])
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(clock))
    assert ceilings.seconds(lambda: None) == 2.0


def test_the_model_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def make(folder: Path, **shape: object) -> None:
        made.append(shape)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(cached_model, "make_shaped_model", make)
    folder = cached_model.cached_model()
    assert cached_model.cached_model() == folder
    assert (len(made), made[0]["vocab"], made[0]["layers"]) == (1, 8192, 28)
    assert list(folder.parent.iterdir()) == [folder]  # no draft is left


def test_a_draft_that_fails_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(folder: Path, **shape: object) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    monkeypatch.setattr(cached_model, "make_shaped_model", fail)
    with pytest.raises(OSError, match="disk full"):
        cached_model.cached_model()
    assert list((tmp_path / "baton").iterdir()) == []
