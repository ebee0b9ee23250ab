"""How supervisors end their children: in their grace, at once where there is haste, one alone."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from baton.deploy.host import instance as instance_module
from baton.deploy.host.instance import Instance, processes_of, read_status
from baton.deploy.serve import supervisor as supervisor_module
from baton.deploy.serve.supervisor import Supervisor
from tests.support.machine_speed import slowness
from tests.support.supervised_jobs import (
    IDLE,
    IGNORE_TERM,
    Start,
    alive,
    python_job,
    rule_of,
    status,
)
from tests.support.waiting import wait_until

DRAINS = (
    "import signal, sys; first = []; "
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0) if first else first.append(1)); "
    "open('/proc/self/comm', 'w').write('drains')\n"
    "while True: signal.pause()"
)


def called(pid: int, name: str) -> bool:
    """Whether the process has got so far."""
    return Path(f"/proc/{pid}/comm").read_text().strip() == name


def draining(start: Start, name: str, grace_s: float) -> int:
    """A child that only ends when it gets two signals."""
    pid = start(python_job(name, DRAINS, grace_s)).pid
    wait_until(lambda: called(pid, "drains"))
    return pid


def test_a_slow_child_is_signalled_twice_when_in_haste(instance: Instance, start: Start) -> None:
    pid = draining(start, "a", grace_s=600.0)
    began = time.monotonic()
    assert instance.end(lambda: time.monotonic() - began > 0.5)
    assert not alive(pid) and 0.5 < time.monotonic() - began < 10 * slowness()
    assert processes_of(instance.instance_id) == []


def test_an_end_in_haste_waits_for_no_child(instance: Instance, start: Start) -> None:
    """And each gets two signals: two signals at once would be one."""
    pids = [draining(start, name, grace_s=600.0) for name in ("a", "b")]
    began = time.monotonic()
    assert instance.end(lambda: True)
    assert time.monotonic() - began < 10 * slowness() and not any(alive(pid) for pid in pids)


def test_a_child_that_is_deaf_to_haste_too_is_killed(
    instance: Instance, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "HURRY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(supervisor_module, "SIGNAL_GAP_S", 0.05)
    job = python_job("a", IGNORE_TERM, grace_s=600.0)
    instance.write_job(job)
    supervisor = Supervisor(instance.folder, job, dict(os.environ))
    running = threading.Thread(target=supervisor.run, daemon=True)
    running.start()
    wait_until(lambda: read_status(instance.folder, "a") is not None)
    found = read_status(instance.folder, "a")
    assert found is not None
    pid = found.pid
    wait_until(lambda: called(pid, "deaf"))
    supervisor.stop()
    running.join(0.3)
    assert running.is_alive() and alive(pid)  # it has its grace
    supervisor.hurry()
    running.join(10 * slowness())
    assert not running.is_alive() and not alive(pid)


def test_one_job_ends_while_the_others_go_on(instance: Instance, start: Start) -> None:
    pids = {name: start(python_job(name, IDLE)).pid for name in ("a", "b")}
    instance.end_job("absent")
    instance.end_job("a")
    assert not alive(pids["a"]) and alive(pids["b"])
    found = [read_status(instance.folder, name) for name in pids]
    assert [each.state for each in found if each is not None] == ["stopped", "running"]
    slow = draining(start, "c", grace_s=600.0)
    instance.end_job("c", lambda: True)
    assert not alive(slow) and alive(pids["b"])


def test_a_killed_child_that_stays_has_no_successor(
    instance: Instance, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a disk in the kernel: the supervisor says so, and waits too."""
    released = threading.Event()
    waits: list[float | None] = []

    class Stuck(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            waits.append(timeout)
            if released.wait(0.02):
                return super().wait(timeout)
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)

    said: list[str] = []
    monkeypatch.setattr(supervisor_module, "_print", said.append)
    monkeypatch.setattr("baton.deploy.serve.supervisor.subprocess.Popen", Stuck)
    job = python_job("a", IDLE)
    supervisor = Supervisor(instance.folder, job, dict(os.environ))
    rule_of(supervisor).longest_pause_s = 0.02
    running = threading.Thread(target=supervisor.run)
    running.start()
    try:
        wait_until(lambda: read_status(instance.folder, "a") is not None)
        wait_until(lambda: status(instance, "a").state == "running")
        first = status(instance, "a").pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(waits) >= 3)
        assert (status(instance, "a").starts, status(instance, "a").pid) == (1, first)
        assert said[:2] == [f"a (process {first}) does not end, though it is killed"] * 2
        released.set()
        wait_until(lambda: status(instance, "a").starts == 2)
    finally:
        released.set()
        supervisor.stop()
        running.join(60)
    assert not running.is_alive()


def test_an_end_says_that_a_supervisor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder stays with it: the next `baton serve` at this port finds the lock there."""
    monkeypatch.setattr(instance_module, "STOP_DEADLINE_S", 0.2)
    monkeypatch.setattr(instance_module, "KILL_S", 0.1)
    claimed = Instance.claim("stays")
    claimed.write_environment({})
    with (claimed.folder / "a.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not claimed.end()
        assert claimed.folder.exists()
    claimed = Instance.claim("stays")
    assert claimed.end() and not claimed.folder.exists()
