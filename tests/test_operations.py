"""The worked examples of docs/operations.md print what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from baton.deploy.cli import main
from tests.support.published_models import PUBLISHED, write_config

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "operations.md").read_text()
EXAMPLES = re.findall(
    r"^```\n\$ (baton size (?:.|\\\n)+?[^\\])\n((?:.+\n)+?)```$", TEXT, re.MULTILINE
)


def test_there_are_examples_of_sizes() -> None:
    assert len(EXAMPLES) == TEXT.count("$ baton size ") == 3


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=[c.split()[2] for c, _ in EXAMPLES])
def test_sizes_are_those_shown(
    command: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in PUBLISHED:
        write_config(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    code = main.main(shlex.split(command.replace("\\\n", " "))[1:])
    assert capsys.readouterr().out == shown
    assert code == (3 if "not met" in shown else 0)
