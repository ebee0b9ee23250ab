"""What is wrong with the registry is told once, and that it is over; it ends no router."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.router.announced import Announced
from baton.runtime.registry import DirectoryRegistry, MemoryRegistry, WorkerRecord

ONE = WorkerRecord("decode-0", "a" * 32, "decode", "127.0.0.1:1", "127.0.0.1:2", "m", 10)
LOOKS = 5


def looked(announced: Announced, times: int = LOOKS) -> list[Any]:
    """What the log was told meanwhile."""
    with capture_logs() as logs:
        for _ in range(times):
            announced.workers()
    return logs


async def test_an_announcement_of_no_use_is_told_once_when_it_changes_and_when_it_is_gone() -> None:
    registry = MemoryRegistry()
    announced = Announced(registry)
    registry.announce(ONE)
    registry.announce(replace(ONE, worker_id="decode-1", boot_id="xyz"))
    (said,) = looked(announced)
    assert (said["worker_id"], said["log_level"]) == ("decode-1", "warning")
    assert "boot id" in said["why"] and list(announced.workers()) == [ONE]
    registry.announce(replace(ONE, worker_id="decode-1", role="router"))  # type: ignore[arg-type]
    (said,) = looked(announced)
    assert "no role 'router'" in said["why"]
    registry.announce(replace(ONE, worker_id="decode-1"))
    (said,) = looked(announced)
    assert (said["worker_id"], said["log_level"]) == ("decode-1", "info")
    assert "gone" in said["event"] and looked(announced) == []


async def test_a_worker_with_another_token_is_told_and_each_renewal_is_not(tmp_path: Path) -> None:
    announced = Announced(DirectoryRegistry(tmp_path, secret="ours"))
    theirs = DirectoryRegistry(tmp_path, secret="theirs")
    said = []
    for _ in range(LOOKS):
        theirs.announce(ONE)
        said += looked(announced)
    assert [entry["worker_id"] for entry in said] == ["decode-0"]
    assert "token" in said[0]["why"]
    theirs.withdraw(ONE.worker_id, ONE.boot_id)
    assert [entry["log_level"] for entry in looked(announced)] == ["info"]


async def test_a_registry_that_cannot_be_read_says_what_it_said_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = MemoryRegistry()
    announced = Announced(registry)
    with monkeypatch.context() as broken:
        broken.setattr(registry, "workers", unreadable)
        assert announced.workers() == () and announced.since_s is None  # it is no empty one
    registry.announce(ONE)
    assert [entry["event"] for entry in looked(announced)] == ["the registry can be read again"]
    since_s = announced.since_s
    assert since_s is not None
    with monkeypatch.context() as broken:
        broken.setattr(registry, "workers", unreadable)
        (said,) = looked(announced)
        assert said["log_level"] == "error" and said["why"].endswith("Too many open files")
        assert list(announced.workers()) == [ONE]
    assert len(looked(announced)) == 1 and announced.since_s == since_s


async def test_what_was_wrong_with_an_announcement_outlasts_a_look_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = MemoryRegistry()
    announced = Announced(registry)
    registry.announce(replace(ONE, boot_id=""))
    assert len(looked(announced)) == 1
    with monkeypatch.context() as broken:
        broken.setattr(registry, "workers", unreadable)
        assert len(looked(announced)) == 1  # that it cannot be read
    assert [entry["event"] for entry in looked(announced)] == ["the registry can be read again"]


def unreadable() -> list[WorkerRecord]:
    raise OSError(errno.EMFILE, "Too many open files")
