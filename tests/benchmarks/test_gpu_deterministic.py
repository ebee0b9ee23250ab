"""The deterministic part of `make gpu`: what it makes of its stories."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.gpu_parts import deterministic as gpu_deterministic

GIVEN = SimpleNamespace(device=torch.device("cpu"), dry=False)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(gpu_deterministic, "_costs", lambda given: [])
    return gpu_deterministic


@pytest.fixture
def ended(part: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Stories end as `how` says; the lines that began them."""
    lines = []

    def make(code=0, **said):
        def run(line, **_):
            lines.append(line)
            assert (Path(line[3]) / "config.json").exists()
            return SimpleNamespace(returncode=code, stdout=json.dumps(said) if said else "")

        monkeypatch.setattr(subprocess, "run", run)
        return lines

    return make


def test_all_that_held_is_counted_over_all_models(
    part: ModuleType, ended: Callable[..., list[list[str]]]
) -> None:
    lines = ended(proved=True, other=True, apart=0.25)
    (figure,) = part.deterministic(GIVEN)
    assert (figure.name, figure.value) == ("deterministic_checks_held", 2.0 * len(part.STORIES))
    assert "--device=cpu" in lines[0] and lines[1][-2:] == list(part.STORIES[1][1])
    assert Path(lines[0][2]).name == "deterministic_story.py" and Path(lines[0][2]).exists()


def test_a_check_that_did_not_hold_fails_the_part_by_name(
    part: ModuleType, ended: Callable[..., list[list[str]]]
) -> None:
    ended(1, proved=True, other=False, apart=0.25)
    with pytest.raises(RuntimeError, match="'other': False"):
        list(part.deterministic(GIVEN))


@pytest.mark.parametrize("code", [0, 1, -9])
def test_a_story_that_says_nothing_fails_the_part(
    part: ModuleType, ended: Callable[..., list[list[str]]], code: int
) -> None:
    ended(code)
    with pytest.raises(RuntimeError, match=f"ended with {code}"):
        list(part.deterministic(GIVEN))
