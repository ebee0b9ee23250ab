"""Jobs of a supervisor, and what their status and processes say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from baton.deploy.host.instance import (
    Instance,
    Job,
    JobStatus,
    read_status,
)
from baton.deploy.host.restarts import RestartRule
from baton.deploy.serve.supervisor import Supervisor

Start = Callable[[Job], JobStatus]

IDLE = "import signal; signal.pause()"  # until a signal ends it
IGNORE_TERM = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "open('/proc/self/comm', 'w').write('deaf'); signal.pause()"
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


def rule_of(supervisor: Supervisor) -> RestartRule:
    """Return the rule by which this supervisor restarts its job. Its times are an operator's
    seconds and minutes; only tests shorten them, and only here."""
    return supervisor._rule


def known_status(supervisor: Supervisor) -> JobStatus:
    """Return the status as the supervisor knows it, written or not."""
    return supervisor._status
