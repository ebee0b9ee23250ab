"""Supervisors as real processes: start again, give up, end with the lifeline, leave no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.deploy.host.instance import (
    Instance,
    Job,
    is_locked,
    processes_of,
    read_progress,
    read_status,
)
from baton.deploy.serve.process_launcher import ProcessLauncher, lacks_supervisor, spawn_supervisors
from tests.support.supervised_jobs import IDLE, IGNORE_TERM, Start, alive, python_job, status
from tests.support.waiting import wait_until


def test_a_killed_child_is_started_again(instance: Instance, start: Start) -> None:
    first = start(python_job("a", IDLE))
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: status(instance, "a").starts == 2)
    wait_until(lambda: status(instance, "a").state == "running")
    second = status(instance, "a")
    assert second.pid != first.pid and alive(second.pid)
    assert second.ended == "signal 9"


def test_what_a_child_said_of_its_start_goes_before_the_next(
    instance: Instance, start: Start
) -> None:
    code = (
        "import os, time; path = os.environ['BATON_PROGRESS_FILE']; "
        "open(path, 'a').write('half '); time.sleep(600)"
    )
    first = start(python_job("a", code))
    wait_until(lambda: read_progress(instance.folder, "a") == "half ")
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: status(instance, "a").starts == 2)
    wait_until(lambda: read_progress(instance.folder, "a") == "half ")


def test_a_child_with_a_wrong_configuration_is_given_up(instance: Instance, start: Start) -> None:
    code = (
        "import os, sys; open(os.environ['BATON_ERROR_FILE'], 'w').write('no such folder\\n'); "
        "sys.exit(78)"
    )
    start(python_job("a", code))
    wait_until(lambda: status(instance, "a").state == "failed")
    found = status(instance, "a")
    assert (found.starts, found.ended, found.message) == (1, "exit code 78", "no such folder")
    wait_until(lambda: not is_locked(instance.folder / "a.lock"))
    assert not lacks_supervisor(instance.folder, "a")


def test_a_child_that_keeps_crashing_is_given_up(instance: Instance, start: Start) -> None:
    start(python_job("a", "import sys; print('why'); sys.exit(1)"))
    wait_until(lambda: status(instance, "a").state == "failed")
    assert status(instance, "a").starts == 5
    assert (instance.folder / "a.log").read_text() == "why\n" * 5


def test_a_missing_command_is_a_failure_with_a_message(instance: Instance, start: Start) -> None:
    start(Job("a", ("/no/such/command",)))
    wait_until(lambda: status(instance, "a").state == "failed")
    assert "/no/such/command" in status(instance, "a").message


def test_the_end_of_the_instance_ends_all_its_processes(instance: Instance, start: Start) -> None:
    for name in ("a", "b"):
        start(python_job(name, IDLE))
    assert len(processes_of(instance.instance_id)) == 4
    assert instance.end()
    assert processes_of(instance.instance_id) == []
    assert not instance.folder.exists()


def test_a_child_deaf_to_sigterm_is_killed_after_its_grace(
    instance: Instance, start: Start
) -> None:
    pid = start(python_job("a", IGNORE_TERM, grace_s=0.2)).pid
    wait_until(lambda: Path(f"/proc/{pid}/comm").read_text().strip() == "deaf")
    assert instance.end()
    assert not alive(pid)


def test_grandchildren_end_with_their_group(instance: Instance, start: Start) -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {IDLE!r}]); {IDLE}"
    child = start(python_job("a", code))
    wait_until(lambda: len(processes_of(instance.instance_id)) == 3)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: status(instance, "a").starts == 2)
    wait_until(lambda: len(processes_of(instance.instance_id)) == 3)


def test_a_killed_supervisor_takes_its_child_and_is_replaced(
    instance: Instance, start: Start
) -> None:
    launcher = ProcessLauncher(instance.folder, ["a"])
    child = start(python_job("a", IDLE))
    (supervisor,) = set(processes_of(instance.instance_id)) - {child.pid}
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not alive(child.pid))  # the thread that started it has ended
    wait_until(lambda: lacks_supervisor(instance.folder, "a"))  # and then the others
    launcher.tend()
    wait_until(lambda: status(instance, "a").pid != child.pid)
    found = status(instance, "a")
    assert alive(found.pid)
    assert (found.starts, found.ended) == (2, "with its supervisor")


def test_a_second_supervisor_leaves_the_first_its_job(instance: Instance, start: Start) -> None:
    child = start(python_job("a", IDLE))
    spawn_supervisors(instance.folder, ["a", "a"])
    assert len(processes_of(instance.instance_id)) == 2
    assert status(instance, "a").pid == child.pid and alive(child.pid)


@pytest.mark.parametrize("other_id", [None, "another"])
def test_a_supervisor_without_a_lifeline_starts_nothing(
    instance: Instance, other_id: str | None
) -> None:
    instance.write_job(python_job("a", IDLE))
    if other_id is None:
        instance.release()
    else:
        (instance.folder / "lifeline").write_text(other_id)
    spawn_supervisors(instance.folder, ["a"])
    assert processes_of(instance.instance_id) == []
    assert read_status(instance.folder, "a") is None


def test_no_orphan_after_kill_9_of_the_instances_process() -> None:
    code = (
        "import signal, sys\n"
        "from baton.deploy.host.instance import Instance, Job\n"
        "from baton.deploy.serve.process_launcher import ProcessLauncher\n"
        "instance = Instance.claim('killed')\n"
        "instance.write_environment({})\n"
        f"instance.write_job(Job('a', (sys.executable, '-S', '-c', {IDLE!r})))\n"
        "ProcessLauncher(instance.folder, ['a']).tend()\n"
        "print(instance.instance_id, flush=True)\n"
        "signal.pause()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    instance_id = parent.stdout.readline().strip()
    wait_until(lambda: len(processes_of(instance_id)) == 2)
    parent.kill()
    parent.communicate(timeout=60)
    wait_until(lambda: processes_of(instance_id) == [])
