"""Only whole models whose figures reach their limits come into the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.models import ship
from baton.models.evaluation.scoring import LIMITS
from baton.runtime.errors import ConfigError

NAMES = ("baton-tiny", "baton-tiny-draft")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    folder = tmp_path / "trained"
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        for file in ship.SHIPPED_FILES:
            (folder / name / file).write_text(f"{file} of {name}")
    (folder / "loss.png").write_bytes(b"png")
    (folder / "evaluation.json").write_text(json.dumps(LIMITS))
    return folder


def test_everything_is_copied_and_what_was_there_is_gone(trained: Path, tmp_path: Path) -> None:
    into = tmp_path / "package"
    (into / "baton-tiny").mkdir(parents=True)
    (into / "baton-tiny" / "old.safetensors").touch()
    ship.main(["--folder", str(trained), "--into", str(into)])
    for name in NAMES:
        assert (into / name / "model.safetensors").read_text() == f"model.safetensors of {name}"
    beside = {path.name for path in (into / "baton-tiny").iterdir()}
    assert beside == {*ship.SHIPPED_FILES, "loss.png", "evaluation.json"}


@pytest.mark.parametrize("figure", LIMITS)
def test_a_figure_below_its_limit_ships_nothing(trained: Path, tmp_path: Path, figure: str) -> None:
    (trained / "evaluation.json").write_text(json.dumps({**LIMITS, figure: LIMITS[figure] - 0.001}))
    with pytest.raises(ConfigError, match=figure):
        ship.ship(trained, tmp_path)
    assert not (tmp_path / "baton-tiny").exists()


@pytest.mark.parametrize("lost", ["baton-tiny-draft/model.safetensors", "evaluation.json"])
def test_a_missing_part_is_named_and_ships_nothing(
    trained: Path, tmp_path: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / lost).unlink()
    with pytest.raises(SystemExit) as ended:
        ship.main(["--folder", str(trained), "--into", str(tmp_path)])
    assert ended.value.code == 1 and f"{lost} is missing" in capsys.readouterr().err
    assert not (tmp_path / "baton-tiny").exists()
