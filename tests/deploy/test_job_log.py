"""Logs that do not outgrow their bound, and that outlive their instance where the user wants it."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.deploy.host.instance import Instance, Job
from baton.deploy.host.job_log import keep_logs, open_log, rotate
from baton.deploy.serve import supervisor as supervisor_module
from baton.deploy.serve.supervisor import Supervisor
from baton.runtime.errors import ConfigError
from tests.support.supervised_jobs import status
from tests.support.waiting import wait_until


def test_a_log_is_for_this_user_alone_and_is_appended_to(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        with open_log(tmp_path, "a") as log:
            log.write(line)
    assert (tmp_path / "a.log").read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE((tmp_path / "a.log").stat().st_mode) == 0o600


def test_a_short_log_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"x" * 10)
    assert not rotate(tmp_path, "a", 10)
    assert (tmp_path / "a.log").stat().st_size == 10 and not (tmp_path / "a.log.1").exists()


def test_a_long_log_is_rotated_and_its_writer_starts_over(
    tmp_path: Path,
) -> None:
    with open_log(tmp_path, "a") as log:
        for turn in (b"first", b"second"):
            log.write(turn * 10)
            log.flush()
            assert rotate(tmp_path, "a", 40)
            log.write(b"after " + turn)
            log.flush()
            assert (tmp_path / "a.log").read_bytes() == b"after " + turn
            assert (tmp_path / "a.log.1").read_bytes().endswith(turn * 10)
    assert (tmp_path / "a.log.1").read_bytes() == b"after first" + b"second" * 10
    assert stat.S_IMODE((tmp_path / "a.log.1").stat().st_mode) == 0o600


def test_on_a_full_disk_a_log_is_cut_all_the_same_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.log").write_bytes(b"x" * 100)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    assert rotate(tmp_path, "a", 40)
    text = (tmp_path / "a.log").read_text()
    assert "was cut" in text and "No space left" in text and len(text) < 100
    assert not (tmp_path / "a.log.1").exists()


@contextmanager
def supervised(instance: Instance, job: Job) -> Iterator[None]:
    """The job has a supervisor, on a thread of this process."""
    supervisor = Supervisor(instance.folder, job, dict(os.environ))
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        yield
    finally:
        supervisor.stop()
        thread.join(60)
    assert not thread.is_alive()


def test_a_supervisor_bounds_what_its_job_writes(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.02)
    code = (
        "import time\n"
        "for n in range(10**9):\n    print(f'line {n}', 'x' * 200, flush=True); time.sleep(0.001)"
    )
    job = Job("a", (sys.executable, "-S", "-c", code), log_bytes=20_000)
    before = instance.folder / "a.log.1"
    seen: set[str] = set()

    def three_turns() -> bool:
        if before.exists():
            seen.add(before.read_text(errors="replace")[:20])
        return len(seen) > 3

    with supervised(instance, job):
        wait_until(three_turns)
    last = (instance.folder / "a.log").read_text()
    assert last == "" or last.startswith("line ")  # no hole at its beginning


def test_a_log_that_cannot_be_cut_ends_no_job(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.02)
    # it sleeps for longer than the test: the supervisor ends it
    code = "import os, sys, time; os.unlink(sys.argv[1]); time.sleep(600)"
    log = str(instance.folder / "a.log")
    said: list[str] = []

    def said_twice() -> bool:
        said.append(capsys.readouterr().err)
        return "".join(said).count("the log of a was not cut") > 1

    with supervised(instance, Job("a", (sys.executable, "-S", "-c", code, log))):
        wait_until(said_twice)
        assert (status(instance, "a").state, status(instance, "a").starts) == ("running", 1)


def test_logs_that_are_kept_outlive_their_instance(tmp_path: Path) -> None:
    kept, claimed = tmp_path / "of" / "mine", Instance.claim("port-7")
    keep_logs(claimed.folder, ["router", "decode-0"], kept)
    with open_log(claimed.folder, "decode-0") as log:
        log.write(b"x" * 50)
    assert rotate(claimed.folder, "decode-0", 40)
    with open_log(claimed.folder, "decode-0") as log:
        log.write(b"y")
    assert claimed.end() and not claimed.folder.exists()
    found = {path.name: path.read_bytes() for path in kept.iterdir()}
    assert found == {
        "port-7-router.log": b"",
        "port-7-decode-0.log": b"y",
        "port-7-decode-0.log.1": b"x" * 50,
    }
    again = Instance.claim("port-7")  # and are appended to by the next one
    keep_logs(again.folder, ["router", "decode-0"], kept)
    assert (again.folder / "decode-0.log").read_bytes() == b"y"
    again.end()


def test_a_folder_unfit_for_logs_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"telemetry\.log_folder .*file cannot be used"):
        keep_logs(tmp_path, ["router"], tmp_path / "file")
