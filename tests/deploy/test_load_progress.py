"""A worker reports its loading in the log and to its supervisor: first, last, every few seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.deploy.host import load_progress
from baton.deploy.host.instance import PROGRESS_KEY, read_progress
from baton.deploy.host.load_progress import LoadProgress

Said = list[dict[str, object]]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """What is logged."""
    lines: Said = []

    class Log:
        def info(self, event: str, **fields: object) -> None:
            lines.append({"event": event, **fields})

        warning = info

    monkeypatch.setattr(load_progress, "log", Log())
    monkeypatch.delenv(PROGRESS_KEY, raising=False)
    return lines


def test_loading_is_reported_at_its_ends_and_every_few_seconds(said: Said) -> None:
    now = [100.0]
    progress = LoadProgress(lambda: now[0])
    for second in range(8):
        now[0] = 100.0 + second
        progress(second * 10, 200)
    progress(200, 200)
    assert [(line["event"], line["percent"]) for line in said] == [
        ("load progress reported", 0.0),
        ("load progress reported", 15.0),
        ("load progress reported", 30.0),
        ("load progress reported", 100.0),
    ]
    assert (said[-1]["done_bytes"], said[-1]["total_bytes"], said[-1]["seconds"]) == (200, 200, 7.0)


def test_load_progress_is_read_in_words(
    said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert read_progress(tmp_path, "decode-0") is None
    monkeypatch.setenv(PROGRESS_KEY, str(tmp_path / "decode-0.progress"))
    progress = LoadProgress()
    progress(400_000_000, 1_600_000_000)
    assert read_progress(tmp_path, "decode-0") == "loading weights: 25 % of 1.60 GB"
    progress(1_600_000_000, 1_600_000_000)
    last = read_progress(tmp_path, "decode-0")
    assert last is not None and last.startswith(
        "loading weights: 100 % of 1.60 GB; now its kernels (the first compilation"
    )


def test_a_file_that_cannot_be_written_ends_no_loading(
    said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(PROGRESS_KEY, str(tmp_path / "removed" / "decode-0.progress"))
    LoadProgress()(1, 2)
    assert "load progress not written" in str(said[-1]["event"])
