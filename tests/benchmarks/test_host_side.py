"""The stand-in for a decode worker's host side: the real scheduler, at a small size."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2]
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_every_sequence_is_in_every_step(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("host_side")
    monkeypatch.setattr(module, "PROMPT_TOKENS", 20)
    monkeypatch.setattr(module, "OUTPUT_TOKENS", 40)
    host = module.HostSide(5)
    assert host._scheduler.running == 5
    batches = []
    original = module.prepare
    monkeypatch.setattr(
        module, "prepare", lambda batch, bounds: batches.append(batch) or original(batch, bounds)
    )
    times = [host.step() for _ in range(15)]  # past the end of a block
    assert [len(batch.slices) for batch in batches] == [5] * 15
    starts = [[item.start for item in batch.slices] for batch in batches]
    assert starts == [[20 + step] * 5 for step in range(15)]
    assert all(min(t.plan_s, t.prepare_s, t.commit_s) > 0 for t in times)
    assert times[0].total_s == times[0].plan_s + times[0].prepare_s + times[0].commit_s
    host._scheduler._pool.check()
    assert host._scheduler.preemptions == 0


def test_ceilings_are_rates(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("ceilings")
    monkeypatch.setattr(module, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_SHAPES", ((8, 16, 32), (4, 4, 4)))
    ceilings = module.Ceilings()
    assert ceilings._words.sum() == (1 << 20) // 8  # nothing is read from a shared zero page
    monkeypatch.setattr(module, "seconds", lambda call: call() is None or 0.5)
    assert ceilings.read_bytes_s() == (1 << 20) / 0.5
    assert ceilings.linear_flops() == 2 * 8 * 16 * 32 / 0.5
    unit = module.matrix_unit() != module.NO_UNIT
    kind = torch.bfloat16 if unit else torch.float32  # what torch is fast in here
    assert [x.dtype for pair in ceilings._operands for x in pair] == [kind] * 4


def test_the_faster_call_counts(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("ceilings")
    clock = iter([0.0, 5.0, 10.0, 12.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    assert module.seconds(lambda: None) == 2.0


def test_the_model_is_made_once(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load("cached_model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def make(folder: Path, **shape: object) -> None:
        made.append(shape)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(module, "make_shaped_model", make)
    folder = module.cached_model()
    assert module.cached_model() == folder
    assert (len(made), made[0]["vocab"], made[0]["layers"]) == (1, 8192, 28)
    assert list(folder.parent.iterdir()) == [folder]  # no draft is left


def test_a_draft_that_fails_is_removed(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load("cached_model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(folder: Path, **shape: object) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    monkeypatch.setattr(module, "make_shaped_model", fail)
    with pytest.raises(OSError, match="disk full"):
        module.cached_model()
    assert list((tmp_path / "baton").iterdir()) == []
