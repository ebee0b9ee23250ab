"""The progress of each worker, from the driver of `baton fleet` to `baton serve`.

    worker ─▶ its files on the node ─▶ actor's report ─▶ driver ─▶ fleet.progress ─▶ baton serve

The driver writes one file, which its supervisor named to it. Knows nothing of Ray.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.deploy.host.instance import PROGRESS_KEY, read_progress, write_private
from baton.runtime.errors import ConfigError, Unavailable


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """A worker of a fleet. `address` is empty while it is not registered; then `text` says what it
    does or waits for, and `log` has the last lines of its log, if it runs on a node. `memory` as
    the worker announces it. `given_up`: its node no longer starts it, or its start
    failed."""

    worker_id: str
    node: str = ""
    text: str = ""
    address: str = ""
    memory: str = ""
    given_up: bool = False
    log: str = ""

    @property
    def label(self) -> str:
        """Return the worker's name with its node, if it has one."""
        return f"{self.worker_id} on {self.node}" if self.node else self.worker_id

    def lines(self) -> list[str]:
        """Return the line that `baton serve` prints about it."""
        if not self.address:
            return [f"{self.label}: {self.text}"]
        memory = [f"{self.worker_id} memory: {self.memory}"] if self.memory else []
        return [f"{self.worker_id} ready at {self.address}", *memory]

    def failure(self) -> str:
        """Return why it is not ready, with the end of its log."""
        log = f" The end of its log:\n{self.log}" if self.log else ""
        return f"{self.label} is not ready: {self.text}.{log}"


def check_start(workers: Sequence[WorkerProgress], *, overdue: bool) -> None:
    """Raise ConfigError naming the workers that were given up, and if the start is `overdue`
    Unavailable naming all that are not ready."""
    if given_up := [each for each in workers if each.given_up]:
        raise ConfigError("\n".join(each.failure() for each in given_up))
    missing = [each for each in workers if not each.address]
    if overdue and missing:
        failures = "\n".join(each.failure() for each in missing)
        raise Unavailable(f"{failures}\nThe time of --start-timeout is over")


def write_fleet_progress(workers: Sequence[WorkerProgress]) -> None:
    """Write the file, if a supervisor named one to this process. Raises OSError."""
    if PROGRESS_KEY in os.environ:
        rows = json.dumps([asdict(each) for each in workers])
        write_private(Path(os.environ[PROGRESS_KEY]), rows)


def read_fleet_progress(folder: Path, job: str) -> list[WorkerProgress]:
    """Return what the driver, which is `job` of the instance in `folder`, wrote last."""
    text = read_progress(folder, job)
    return [] if text is None else [WorkerProgress(**row) for row in json.loads(text)]
