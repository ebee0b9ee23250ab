"""Starts supervisors from this very process: the launcher for one machine without Ray.

`Launcher` is what both launchers are to `baton serve`. Starting twice does no harm: a job has one
supervisor, however many are started. Jobs, environment and status are files of the instance; a
launcher owns only the times at which it started supervisors."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from baton.deploy.host.instance import is_locked, read_environment, read_status
from baton.deploy.host.job_log import open_log
from baton.deploy.host.restarts import OTHER_EXIT, RestartRule
from baton.deploy.serve.supervisor import ALREADY_KEPT, NO_LIFELINE
from baton.runtime.errors import BatonError

SPAWN_TIMEOUT_S = 30.0


class Launcher(Protocol):
    """`tend` is called a few times a second and sees to it that each job has a supervisor; it
    returns at once or within a supervisor's start. Raises BatonError when it cannot; a later call
    tries again."""

    def tend(self) -> None: ...


class ProcessLauncher:
    """Supervisors started by this process for the jobs `names` of the instance in `folder`. One
    that ends soon is started again after a pause that grows. `now` in seconds."""

    def __init__(
        self, folder: Path, names: Sequence[str], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._now = now
        self._pauses = {name: RestartRule() for name in names}
        self._started = dict.fromkeys(names, -math.inf)
        self._next = dict.fromkeys(names, -math.inf)

    def tend(self) -> None:
        now = self._now()
        try:
            lacking = [
                name
                for name, due in self._next.items()
                if now >= due and lacks_supervisor(self._folder, name)
            ]
            for name in lacking:
                pause_s = self._pauses[name].pause_s(now - self._started[name], OTHER_EXIT)
                self._started[name], self._next[name] = now, now + pause_s
            if lacking:
                spawn_supervisors(self._folder, lacking)
        except OSError as error:
            raise BatonError(f"a supervisor cannot be started: {error}") from error


def lacks_supervisor(folder: Path, name: str) -> bool:
    """Whether a job should have a supervisor and has none; a job that was given up needs none."""
    if is_locked(folder / f"{name}.lock"):
        return False
    status = read_status(folder, name)
    return status is None or status.state != "failed"


def spawn_supervisors(folder: Path, names: Sequence[str]) -> None:
    """Start the supervisors of these jobs together, and return when each holds its job.

    A job that is kept already stays as it is; an instance that has ended starts nothing.
    Raises BatonError when a supervisor cannot start.
    """
    environment = os.environ | read_environment(folder)
    spawned: list[tuple[str, subprocess.Popen[bytes]]] = []
    failures: list[str] = []
    for name in names:
        command = [sys.executable, "-P", "-m", "baton.deploy.serve.supervisor", str(folder), name]
        try:
            with open_log(folder, name) as log:
                supervisor = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )
        except OSError as error:  # of one; the others may start
            failures.append(f"the supervisor of {name} was not started: {error}")
        else:
            spawned.append((name, supervisor))
    for name, process in spawned:
        try:
            code = process.wait(SPAWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(SPAWN_TIMEOUT_S)
            failures.append(f"the supervisor of {name} did not start in time")
            continue
        if code not in (0, ALREADY_KEPT, NO_LIFELINE):
            failures.append(f"the supervisor of {name} ended with {code}: see {name}.log")
    if failures:
        raise BatonError("; ".join(failures))
