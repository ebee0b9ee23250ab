"""A disk that can be filled to the last byte, and is gone at the end."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from chaos import small_disk
from chaos.small_disk import SmallDisk


def test_it_is_full_until_it_is_cleared(tmp_path: Path) -> None:
    if why := small_disk.unavailable():
        pytest.skip(why)
    with SmallDisk(tmp_path) as disk:
        log = tmp_path / "log"
        log.write_text("before")
        disk.fill()
        with pytest.raises(OSError) as failed:
            log.write_text("x" * 10_000)
        assert failed.value.errno == errno.ENOSPC
        disk.clear()
        log.write_text("x" * 10_000)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_permitted_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("chaos.small_disk.SIZE", "no size")
    assert "mount" in small_disk.unavailable()
