"""When supervisors are started, and that one which cannot be holds up no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.deploy.host.instance import Instance, Job, is_locked
from baton.deploy.serve import process_launcher
from baton.deploy.serve.process_launcher import ProcessLauncher, spawn_supervisors
from baton.runtime.errors import BatonError

TICK_S = 0.1


class Supervisors:
    """Scripted: `lives_s` after its start each supervisor ends. Counts the starts, by time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lives_s: float = 0.0) -> None:
        self.now = 0.0
        self.lives_s = lives_s
        self.starts: list[tuple[float, str]] = []
        self.failure: Exception | None = None
        monkeypatch.setattr(process_launcher, "lacks_supervisor", self._lacks)
        monkeypatch.setattr(process_launcher, "spawn_supervisors", self._spawn)
        self.launcher = ProcessLauncher(Path("/run/i"), ["a", "b"], lambda: self.now)

    def _lacks(self, _: Path, name: str) -> bool:
        last = max((at for at, of in self.starts if of == name), default=-1e9)
        return self.now >= last + self.lives_s

    def _spawn(self, _: Path, names: list[str]) -> None:
        self.starts += [(self.now, name) for name in names]
        if self.failure is not None:
            raise self.failure

    def pass_s(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.launcher.tend()
            self.now += TICK_S

    def of(self, name: str) -> list[float]:
        return [round(at, 1) for at, started in self.starts if started == name]


def test_a_supervisor_that_ends_at_once_starts_ever_more_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisors = Supervisors(monkeypatch)
    supervisors.pass_s(100)
    for name in ("a", "b"):
        found = supervisors.of(name)
        pauses = [after - before for before, after in zip(found, found[1:], strict=False)]
        expected = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 12]  # and it is never given up
        assert pauses[:18] == pytest.approx(expected, abs=TICK_S + 0.01)


def test_a_supervisor_that_lived_long_is_started_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisors = Supervisors(monkeypatch, lives_s=60.0)
    supervisors.pass_s(200)
    assert len(supervisors.of("a")) == 4
    assert all(at - 60 * index <= 1.0 for index, at in enumerate(supervisors.of("a")))


def test_a_failed_start_is_reported_and_retried_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisors = Supervisors(monkeypatch)
    supervisors.failure = OSError(11, "no process")
    reported = 0
    for _ in range(600):
        try:
            supervisors.pass_s(TICK_S)
        except BatonError as error:
            assert "no process" in str(error)
            supervisors.now += TICK_S
            reported += 1
    assert 10 < reported == len(supervisors.of("a")) == len(supervisors.of("b")) < 25


def test_one_whose_log_cannot_be_opened_holds_up_no_other(
    instance: Instance, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        instance.write_job(Job(name, ("sleep", "600")))
    (instance.folder / "a.log").symlink_to(tmp_path / "gone" / "a.log")
    with pytest.raises(BatonError, match=r"supervisor of a was not started.*a\.log"):
        spawn_supervisors(instance.folder, ["a", "b"])
    assert not is_locked(instance.folder / "a.lock") and is_locked(instance.folder / "b.lock")


def test_every_supervisor_that_fails_is_named(instance: Instance) -> None:
    locks = [instance.folder / f"{name}.lock" for name in ("a", "b")]
    for lock in locks:
        lock.mkdir()  # so that it cannot be held
    with pytest.raises(BatonError, match=r"of a ended with 1: see a\.log; .*of b ended with 1"):
        spawn_supervisors(instance.folder, ["a", "b"])
    for lock in locks:
        lock.rmdir()


def test_an_instance_that_cannot_be_read_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(BatonError, match=r"environment\.json"):
        ProcessLauncher(tmp_path, ["a"]).tend()
