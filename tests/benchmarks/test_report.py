"""What benchmarks share: figures against limits, the table and the JSON file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.figures import report


def test_figures_hold_up_to_their_limits() -> None:
    assert report.at_most("a", 8.0, 8.0).holds is True
    assert report.at_most("a", 8.1, 8.0).holds is False
    assert report.at_least("a", 0.75, 0.75).holds is True
    assert report.at_least("a", float("nan"), 0.75).holds is False
    assert report.Figure("a", 1.0).holds is None


def test_the_table_and_the_file_say_the_same(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "--json", "x"])
    file = tmp_path / "out.json"
    figures = [
        report.at_most("overhead_p50", 9.25, 8, "ms"),
        report.Figure("rate", 1.5, "GB/s", "raw READ: 6.2"),
    ]
    report.report(figures, file, ["peer left out"])
    text = capsys.readouterr().out
    assert text.startswith("$ python ")
    assert "--json x" in text.splitlines()[0]
    assert "cores" in text.splitlines()[1]
    assert "9.25 ms     limit: at most 8  DOES NOT HOLD" in text
    assert "1.5 GB/s   raw READ: 6.2" in text
    assert text.splitlines()[-1] == "peer left out"
    content = json.loads(file.read_text())
    assert content["notes"] == ["peer left out"]
    assert content["machine"]["cpu"]
    assert content["figures"][0] == {
        "name": "overhead_p50",
        "value": 9.25,
        "unit": "ms",
        "beside": "limit: at most 8",
        "holds": False,
    }


def test_the_parser_takes_the_file() -> None:
    made = report.parser("measures")
    assert made.parse_args(["--json", "f"]).json == Path("f")
    assert made.parse_args([]).json is None
