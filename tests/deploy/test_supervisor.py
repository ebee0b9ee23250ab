"""Supervisors as real processes: start again, give up, end with the lifeline, leave no orphan."""

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
from typing import Any

import pytest

from baton.deploy.host.instance import (
    Instance,
    Job,
    JobStatus,
    is_locked,
    processes_of,
    read_progress,
    read_status,
    write_private,
)
from baton.deploy.host.restarts import RestartRule
from baton.deploy.serve import supervisor as supervisor_module
from baton.deploy.serve.process_launcher import ProcessLauncher, lacks_supervisor, spawn_supervisors
from baton.deploy.serve.supervisor import Supervisor

Wait = Callable[[Callable[[], bool]], bool]
Start = Callable[[Job], JobStatus]

SLEEP = "import time; time.sleep(600)"
IGNORE_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "open('/proc/self/comm', 'w').write('deaf'); time.sleep(600)"
)


def python_job(name: str, code: str, grace_s: float = 10.0) -> Job:
    return Job(name, (sys.executable, "-S", "-c", code), grace_s)


def status(instance: Instance, name: str) -> JobStatus:
    found = read_status(instance.folder, name)
    assert found is not None
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_child_is_started_again(instance: Instance, start: Start, wait_for: Wait) -> None:
    first = start(python_job("a", SLEEP))
    os.kill(first.pid, signal.SIGKILL)
    assert wait_for(lambda: status(instance, "a").starts == 2)
    assert wait_for(lambda: status(instance, "a").state == "running")
    second = status(instance, "a")
    assert second.pid != first.pid and alive(second.pid)
    assert second.ended == "signal 9"


def test_what_a_child_said_of_its_start_goes_before_the_next(
    instance: Instance, start: Start, wait_for: Wait
) -> None:
    code = (
        "import os, time; path = os.environ['BATON_PROGRESS_FILE']; "
        "open(path, 'a').write('half '); time.sleep(600)"
    )
    first = start(python_job("a", code))
    assert wait_for(lambda: read_progress(instance.folder, "a") == "half ")
    os.kill(first.pid, signal.SIGKILL)
    assert wait_for(lambda: status(instance, "a").starts == 2)
    assert wait_for(lambda: read_progress(instance.folder, "a") == "half ")


def test_a_child_with_a_wrong_configuration_is_given_up(
    instance: Instance, start: Start, wait_for: Wait
) -> None:
    code = (
        "import os, sys; open(os.environ['BATON_ERROR_FILE'], 'w').write('no such folder\\n'); "
        "sys.exit(78)"
    )
    start(python_job("a", code))
    assert wait_for(lambda: status(instance, "a").state == "failed")
    found = status(instance, "a")
    assert (found.starts, found.ended, found.message) == (1, "exit code 78", "no such folder")
    assert wait_for(lambda: not is_locked(instance.folder / "a.lock"))
    assert not lacks_supervisor(instance.folder, "a")


def test_a_child_that_keeps_crashing_is_given_up(
    instance: Instance, start: Start, wait_for: Wait
) -> None:
    start(python_job("a", "import sys; print('why'); sys.exit(1)"))
    assert wait_for(lambda: status(instance, "a").state == "failed")
    assert status(instance, "a").starts == 5
    assert (instance.folder / "a.log").read_text() == "why\n" * 5


def test_a_missing_command_is_a_failure_with_a_message(
    instance: Instance, start: Start, wait_for: Wait
) -> None:
    start(Job("a", ("/no/such/command",)))
    assert wait_for(lambda: status(instance, "a").state == "failed")
    assert "/no/such/command" in status(instance, "a").message


def test_the_end_of_the_instance_ends_all_its_processes(
    instance: Instance, start: Start, wait_for: Wait
) -> None:
    for name in ("a", "b"):
        start(python_job(name, SLEEP))
    assert len(processes_of(instance.instance_id)) == 4
    assert instance.end()
    assert processes_of(instance.instance_id) == []
    assert not instance.folder.exists()


def test_a_child_deaf_to_sigterm_is_killed_after_its_grace(
    instance: Instance, start: Start, wait_for: Wait
) -> None:
    pid = start(python_job("a", IGNORE_TERM, grace_s=0.2)).pid
    assert wait_for(lambda: Path(f"/proc/{pid}/comm").read_text().strip() == "deaf")
    assert instance.end()
    assert not alive(pid)


def test_grandchildren_end_with_their_group(
    instance: Instance, start: Start, wait_for: Wait
) -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"
    child = start(python_job("a", code))
    assert wait_for(lambda: len(processes_of(instance.instance_id)) == 3)
    os.kill(child.pid, signal.SIGKILL)
    assert wait_for(lambda: status(instance, "a").starts == 2)
    assert wait_for(lambda: len(processes_of(instance.instance_id)) == 3)


def test_a_killed_supervisor_takes_its_child_and_is_replaced(
    instance: Instance, start: Start, wait_for: Wait
) -> None:
    launcher = ProcessLauncher(instance.folder, ["a"])
    child = start(python_job("a", SLEEP))
    (supervisor,) = set(processes_of(instance.instance_id)) - {child.pid}
    os.kill(supervisor, signal.SIGKILL)
    assert wait_for(lambda: not alive(child.pid))  # the thread that started it has ended
    assert wait_for(lambda: lacks_supervisor(instance.folder, "a"))  # and then the others
    launcher.tend()
    assert wait_for(lambda: status(instance, "a").pid != child.pid)
    found = status(instance, "a")
    assert alive(found.pid)
    assert (found.starts, found.ended) == (2, "with its supervisor")


def test_a_second_supervisor_leaves_the_first_its_job(
    instance: Instance, start: Start, wait_for: Wait
) -> None:
    child = start(python_job("a", SLEEP))
    spawn_supervisors(instance.folder, ["a", "a"])
    assert len(processes_of(instance.instance_id)) == 2
    assert status(instance, "a").pid == child.pid and alive(child.pid)


@pytest.mark.parametrize("other_id", [None, "another"])
def test_a_supervisor_without_a_lifeline_starts_nothing(
    instance: Instance, other_id: str | None
) -> None:
    instance.write_job(python_job("a", SLEEP))
    if other_id is None:
        instance.release()
    else:
        (instance.folder / "lifeline").write_text(other_id)
    spawn_supervisors(instance.folder, ["a"])
    assert processes_of(instance.instance_id) == []
    assert read_status(instance.folder, "a") is None


def test_no_orphan_after_kill_9_of_the_instances_process(wait_for: Wait) -> None:
    code = (
        "import sys, time\n"
        "from baton.deploy.host.instance import Instance, Job\n"
        "from baton.deploy.serve.process_launcher import ProcessLauncher\n"
        "instance = Instance.claim('killed')\n"
        "instance.write_environment({})\n"
        f"instance.write_job(Job('a', (sys.executable, '-S', '-c', {SLEEP!r})))\n"
        "ProcessLauncher(instance.folder, ['a']).tend()\n"
        "print(instance.instance_id, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    instance_id = parent.stdout.readline().strip()
    assert wait_for(lambda: len(processes_of(instance_id)) == 2)
    parent.kill()
    parent.communicate(timeout=60)
    assert wait_for(lambda: processes_of(instance_id) == [])


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
    supervisor._rule.longest_pause_s = 0.02
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()
        thread.join(60)
    assert not thread.is_alive()


def failing(times: int, error: OSError, real: Any) -> tuple[Callable[..., Any], list[Any]]:
    """`real`, but for the first so many calls."""
    calls: list[Any] = []

    def call(*arguments: Any, **named: Any) -> Any:
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
    instance: Instance, wait_for: Wait, monkeypatch: pytest.MonkeyPatch, error: OSError, of: str
) -> None:
    real = subprocess.Popen if of == "subprocess.Popen" else supervisor_module.open_log
    fail, calls = failing(9, error, real)
    monkeypatch.setattr(f"baton.deploy.serve.supervisor.{of}", fail)
    with keeping(instance, python_job("a", SLEEP), proven=True):
        assert wait_for(lambda: state_of(instance, "a") == "waiting")
        assert error.strerror in status(instance, "a").message
        assert wait_for(lambda: status(instance, "a").starts == 11)
        assert wait_for(lambda: state_of(instance, "a") == "running")
        assert len(calls) == 10 and alive(status(instance, "a").pid)


def test_an_unwatchable_child_is_ended_before_the_next(
    instance: Instance, wait_for: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, calls = failing(3, OSError(errno.EMFILE, "no descriptor"), os.pidfd_open)
    monkeypatch.setattr(os, "pidfd_open", fail)
    with keeping(instance, python_job("a", SLEEP), proven=True):
        assert wait_for(lambda: len(calls) == 4)
        assert wait_for(lambda: state_of(instance, "a") == "running")
        assert [alive(pid) for (pid,) in calls] == [False, False, False, True]


def test_a_child_killed_just_after_the_fork_is_started_again(
    instance: Instance, wait_for: Wait, monkeypatch: pytest.MonkeyPatch
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
    with keeping(instance, python_job("a", SLEEP), proven=True):
        assert wait_for(lambda: len(calls) == 2)
        assert wait_for(lambda: state_of(instance, "a") == "running")
    assert len(calls) == 2 and status(instance, "a").starts == 3  # with that which proved it


def test_a_job_that_never_started_well_is_given_up_with_a_reason(
    instance: Instance, wait_for: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, calls = failing(99, SHORT[0], subprocess.Popen)
    monkeypatch.setattr(subprocess, "Popen", fail)
    with keeping(instance, python_job("a", SLEEP)):
        assert wait_for(lambda: state_of(instance, "a") == "failed")
    found = status(instance, "a")
    assert (found.starts, found.ended) == (RestartRule().attempts, "not started")
    assert found.message == "a was not started: [Errno 11] no process"


@pytest.mark.parametrize("proven", [False, True])
def test_a_lost_log_folder_ends_only_what_never_was_well(
    instance: Instance, tmp_path: Path, wait_for: Wait, proven: bool
) -> None:
    (instance.folder / "a.log").symlink_to(tmp_path / "gone" / "a.log")
    with keeping(instance, python_job("a", SLEEP), proven=proven):
        assert wait_for(lambda: state_of(instance, "a") == ("waiting" if proven else "failed"))
        assert "a.log" in status(instance, "a").message
        (tmp_path / "gone").mkdir()
        if proven:
            assert wait_for(lambda: state_of(instance, "a") == "running")
    assert status(instance, "a").starts == 1 or proven


def test_a_long_run_is_written_down_for_the_next_supervisor(
    instance: Instance, wait_for: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.02)
    with keeping(instance, python_job("a", SLEEP)) as supervisor:
        assert wait_for(lambda: state_of(instance, "a") == "running")
        assert not status(instance, "a").proven
        supervisor._rule.stable_s = 0.05
        assert wait_for(lambda: status(instance, "a").proven)
    assert Supervisor(instance.folder, supervisor._job, {})._rule.proven


def test_an_unwritable_status_ends_no_job_and_is_written_later(
    instance: Instance,
    wait_for: Wait,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    fail, calls = failing(5, full, write_private)
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.02)
    monkeypatch.setattr(supervisor_module, "write_private", fail)
    with keeping(instance, python_job("a", SLEEP)) as supervisor:
        assert wait_for(lambda: read_status(instance.folder, "a") is not None)
        assert status(instance, "a") == supervisor._status
        assert len(calls) == 6 and supervisor._status.starts == 1 and alive(supervisor._status.pid)
    assert "the status of a was not written: [Errno 28] No space left" in capfd.readouterr().err


def test_a_job_keeps_its_supervisor_until_its_end_is_written(
    instance: Instance, wait_for: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another one would start it again, without end."""
    fail, calls = failing(10, OSError(errno.ENOSPC, "full"), write_private)
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.02)
    monkeypatch.setattr(supervisor_module, "write_private", fail)
    with keeping(instance, python_job("a", "import sys; sys.exit(78)")):
        assert wait_for(lambda: read_status(instance.folder, "a") is not None)
    assert status(instance, "a").state == "failed" and len(calls) == 11


def parent_of(process: int) -> int:
    (line,) = re.findall(r"^PPid:\s*(\d+)$", Path(f"/proc/{process}/status").read_text(), re.M)
    return int(line)


def test_a_supervisor_with_a_full_disk_keeps_its_job(
    instance: Instance, wait_for: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.deploy.host.instance.PID_TIMEOUT_S", 0.05)
    instance.write_job(python_job("a", SLEEP))
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
    assert wait_for(lambda: len(processes_of(instance.instance_id)) == 2)
    assert is_locked(instance.folder / "a.lock") and not lacks_supervisor(instance.folder, "a")
    assert read_status(instance.folder, "a") is None
    both = set(processes_of(instance.instance_id))
    (child,) = (process for process in both if parent_of(process) in both)
    os.kill(child, signal.SIGKILL)
    assert wait_for(lambda: both != set(processes_of(instance.instance_id)))
    assert wait_for(lambda: len(processes_of(instance.instance_id)) == 2)
    instance.end_job("a")  # which nobody can tell it: it ends with the instance
    assert is_locked(instance.folder / "a.lock")
