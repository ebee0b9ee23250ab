"""Supervisors that lack processes, memory, descriptors or disk: a job that was well goes on."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from baton.deploy.host.instance import (
    Instance,
    Job,
    JobStatus,
    is_locked,
    processes_of,
    read_status,
    write_private,
)
from baton.deploy.host.restarts import RestartRule
from baton.deploy.serve import supervisor as supervisor_module
from baton.deploy.serve.process_launcher import lacks_supervisor
from baton.deploy.serve.supervisor import Supervisor
from tests.support.supervised_jobs import (
    IDLE,
    alive,
    known_status,
    python_job,
    rule_of,
    status,
)
from tests.support.waiting import wait_until

P = ParamSpec("P")
T = TypeVar("T")


def state_of(instance: Instance, name: str) -> str:
    """Empty before the first status."""
    found = read_status(instance.folder, name)
    return found.state if found else ""


@contextmanager
def keeping(instance: Instance, job: Job, *, proven: bool = False) -> Iterator[Supervisor]:
    """A supervisor in a thread of this process; `proven`: of a job that has run long once."""
    if proven:
        before = JobStatus(job.name, "running", 7, 1, proven=True)
        write_private(instance.folder / f"{job.name}.status", json.dumps(asdict(before)))
    supervisor = Supervisor(instance.folder, job, dict(os.environ))
    rule_of(supervisor).longest_pause_s = 0.02
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()
        thread.join(60)
    assert not thread.is_alive()


def failing(
    times: int, error: OSError, real: Callable[P, T]
) -> tuple[Callable[P, T], list[tuple[Any, ...]]]:
    """`real`, but for the first so many calls."""
    calls: list[tuple[Any, ...]] = []

    def call(*arguments: P.args, **named: P.kwargs) -> T:
        calls.append(arguments)
        if len(calls) <= times:
            raise error
        return real(*arguments, **named)

    return call, calls


SHORT = [BlockingIOError(errno.EAGAIN, "no process"), OSError(errno.ENOMEM, "no memory")]
SHORT += [OSError(errno.EMFILE, "no descriptor"), FileNotFoundError(errno.ENOENT, "no log")]


@pytest.mark.parametrize("error", SHORT, ids=str)
@pytest.mark.parametrize("of", ["subprocess.Popen", "open_log"])
def test_a_job_that_was_well_is_started_once_it_can_be(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, error: OSError, of: str
) -> None:
    real = subprocess.Popen if of == "subprocess.Popen" else supervisor_module.open_log
    fail, calls = failing(9, error, real)
    monkeypatch.setattr(f"baton.deploy.serve.supervisor.{of}", fail)
    with keeping(instance, python_job("a", IDLE), proven=True):
        wait_until(lambda: state_of(instance, "a") == "waiting")
        assert error.strerror in status(instance, "a").message
        wait_until(lambda: status(instance, "a").starts == 11)
        wait_until(lambda: state_of(instance, "a") == "running")
        assert len(calls) == 10 and alive(status(instance, "a").pid)


def test_an_unwatchable_child_is_ended_before_the_next(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, calls = failing(3, OSError(errno.EMFILE, "no descriptor"), os.pidfd_open)
    monkeypatch.setattr(os, "pidfd_open", fail)
    with keeping(instance, python_job("a", IDLE), proven=True):
        wait_until(lambda: len(calls) == 4)
        wait_until(lambda: state_of(instance, "a") == "running")
        assert [alive(pid) for (pid,) in calls] == [False, False, False, True]


def test_a_child_killed_just_after_the_fork_is_started_again(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = subprocess.Popen

    def killed_at_first(*command: Any, **given: Any) -> subprocess.Popen[bytes]:
        child = real(*command, **given | {"start_new_session": bool(calls)})
        calls.append(child.pid)
        if len(calls) == 1:
            child.kill()
        return child

    monkeypatch.setattr("baton.deploy.serve.supervisor.subprocess.Popen", killed_at_first)
    with keeping(instance, python_job("a", IDLE), proven=True):
        wait_until(lambda: len(calls) == 2)
        wait_until(lambda: state_of(instance, "a") == "running")
    assert len(calls) == 2 and status(instance, "a").starts == 3  # with that which proved it


def test_a_job_that_never_started_well_is_given_up_with_a_reason(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, calls = failing(99, SHORT[0], subprocess.Popen)
    monkeypatch.setattr(subprocess, "Popen", fail)
    with keeping(instance, python_job("a", IDLE)):
        wait_until(lambda: state_of(instance, "a") == "failed")
    found = status(instance, "a")
    assert (found.starts, found.ended) == (RestartRule().attempts, "not started")
    assert found.message == "a was not started: [Errno 11] no process"


@pytest.mark.parametrize("proven", [False, True])
def test_a_lost_log_folder_ends_only_what_never_was_well(
    instance: Instance, tmp_path: Path, proven: bool
) -> None:
    (instance.folder / "a.log").symlink_to(tmp_path / "gone" / "a.log")
    with keeping(instance, python_job("a", IDLE), proven=proven):
        wait_until(lambda: state_of(instance, "a") == ("waiting" if proven else "failed"))
        assert "a.log" in status(instance, "a").message
        (tmp_path / "gone").mkdir()
        if proven:
            wait_until(lambda: state_of(instance, "a") == "running")
    assert status(instance, "a").starts == 1 or proven


def test_a_long_run_is_written_down_for_the_next_supervisor(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.02)
    job = python_job("a", IDLE)
    with keeping(instance, job) as supervisor:
        wait_until(lambda: state_of(instance, "a") == "running")
        assert not status(instance, "a").proven
        rule_of(supervisor).stable_s = 0.05
        wait_until(lambda: status(instance, "a").proven)
    assert rule_of(Supervisor(instance.folder, job, {})).proven


def test_an_unwritable_status_ends_no_job_and_is_written_later(
    instance: Instance,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    fail, calls = failing(5, full, write_private)
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.02)
    monkeypatch.setattr(supervisor_module, "write_private", fail)
    with keeping(instance, python_job("a", IDLE)) as supervisor:
        wait_until(lambda: read_status(instance.folder, "a") is not None)
        known = known_status(supervisor)
        assert status(instance, "a") == known
        assert len(calls) == 6 and known.starts == 1 and alive(known.pid)
    assert "the status of a was not written: [Errno 28] No space left" in capfd.readouterr().err


def test_a_job_keeps_its_supervisor_until_its_end_is_written(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another one would start it again, without end."""
    unwritten: list[str] = []

    def fail(path: Path, text: str) -> None:
        if json.loads(text)["state"] == "failed" and len(unwritten) < 10:
            unwritten.append(text)
            raise OSError(errno.ENOSPC, "full")
        write_private(path, text)

    def has_failed() -> bool:
        found = read_status(instance.folder, "a")
        return found is not None and found.state == "failed"

    monkeypatch.setattr(supervisor_module, "POLL_S", 0.02)
    monkeypatch.setattr(supervisor_module, "write_private", fail)
    with keeping(instance, python_job("a", "import sys; sys.exit(78)")):
        wait_until(has_failed)
    assert len(unwritten) == 10


def parent_of(process: int) -> int:
    (line,) = re.findall(r"^PPid:\s*(\d+)$", Path(f"/proc/{process}/status").read_text(), re.M)
    return int(line)


def test_a_supervisor_with_a_full_disk_keeps_its_job(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.deploy.host.instance.PID_TIMEOUT_S", 0.05)
    instance.write_job(python_job("a", IDLE))
    command = [
        sys.executable,
        "-P",
        "-m",
        "baton.deploy.serve.supervisor",
        str(instance.folder),
        "a",
    ]
    nothing = (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    with open("/dev/full", "w") as full:
        started = subprocess.run(
            command,
            stderr=full,
            env=os.environ | {"BATON_INSTANCE": instance.instance_id},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, nothing),
            timeout=60,
            check=False,
        )
    assert started.returncode == 0
    wait_until(lambda: len(processes_of(instance.instance_id)) == 2)
    assert is_locked(instance.folder / "a.lock") and not lacks_supervisor(instance.folder, "a")
    assert read_status(instance.folder, "a") is None
    both = set(processes_of(instance.instance_id))
    (child,) = (process for process in both if parent_of(process) in both)
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: both != set(processes_of(instance.instance_id)))
    wait_until(lambda: len(processes_of(instance.instance_id)) == 2)
    instance.end_job("a")  # no signal reaches it: it ends with the instance
    assert is_locked(instance.folder / "a.lock")
