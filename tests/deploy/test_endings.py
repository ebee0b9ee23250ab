"""How supervisors end their children: in their grace, at once where there is haste, one alone."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from baton.deploy.host.instance import Instance, processes_of, read_status
from baton.deploy.serve import supervisor as supervisor_module
from baton.deploy.serve.supervisor import Supervisor
from tests.support.machine_speed import slowness
from tests.support.supervised_jobs import IDLE, IGNORE_TERM, Start, alive, python_job
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
    instance.end_job("nobody")
    instance.end_job("a")
    assert not alive(pids["a"]) and alive(pids["b"])
    found = [read_status(instance.folder, name) for name in pids]
    assert [each.state for each in found if each is not None] == ["stopped", "running"]
    slow = draining(start, "c", grace_s=600.0)
    instance.end_job("c", lambda: True)
    assert not alive(slow) and alive(pids["b"])
