"""Starts keepers from this very process: the launcher for one machine without Ray.

`Launcher` is what both launchers are to `baton serve`. Starting twice does no harm: a job has
one keeper, whoever asks. Owns nothing: jobs, environment and status are files of the instance.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from baton.deploy.instance import is_locked, read_environment, read_status
from baton.deploy.job_log import open_log
from baton.deploy.supervisor import ALREADY_KEPT, NO_LIFELINE
from baton.runtime.errors import BatonError

SPAWN_TIMEOUT_S = 30.0


class Launcher(Protocol):
    """`tend` is called a few times a second and sees to it that each job has a keeper; it
    returns at once or within a keeper's start. Raises BatonError when it cannot."""

    def tend(self) -> None: ...


class ProcessLauncher:
    """Keepers started by this process for the jobs `names` of the instance in `folder`."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = tuple(names)

    def tend(self) -> None:
        lacking = [name for name in self._names if lacks_keeper(self._folder, name)]
        spawn_keepers(self._folder, lacking)


def lacks_keeper(folder: Path, name: str) -> bool:
    """Whether a job should have a keeper and has none; a job that was given up needs none."""
    if is_locked(folder / f"{name}.lock"):
        return False
    status = read_status(folder, name)
    return status is None or status.state != "failed"


def spawn_keepers(folder: Path, names: Sequence[str]) -> None:
    """Start the keepers of these jobs together, and return when each holds its job.

    A job that is kept already stays as it is; an instance that has ended starts nothing.
    Raises BatonError when a keeper cannot start.
    """
    environment = os.environ | read_environment(folder)
    spawned = []
    for name in names:
        with open_log(folder, name) as log:
            command = [sys.executable, "-P", "-m", "baton.deploy.supervisor", str(folder), name]
            spawned.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )
            )
    for name, process in zip(names, spawned, strict=True):
        try:
            code = process.wait(SPAWN_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.wait(SPAWN_TIMEOUT_S)
            raise BatonError(f"the keeper of {name} did not start in time") from error
        if code not in (0, ALREADY_KEPT, NO_LIFELINE):
            raise BatonError(f"the keeper of {name} ended with {code}: see {name}.log")
