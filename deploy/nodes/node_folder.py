"""The folder on a node with the jobs, locks and logs of the supervisors of a cluster's workers.

    <runtime folder>/ray-<cluster>/    mode 0700; one for each node
      environment.json    what every worker adds to the node's environment; no secret
      <worker>.tended     flocked by the actor of Ray that tends the worker
      <worker>.lock       flocked by the supervisor (instance.py has the other files)
      leaving             start of the machine or container that this node leaves with

A supervisor outlives its actor. While no process holds the first lock it starts no worker,
so that Ray may have it started elsewhere. All that finds a running worker again is here.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from baton.deploy.host.instance import (
    make_private_folder,
    runtime_folder,
    signal_supervisor,
    tended_lock,
    wait_unkept,
    write_private,
)

LEAVING = "leaving"
THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}  # as `baton serve` sets them


def node_folder(cluster: str, environ: Mapping[str, str]) -> Path:
    """Return the cluster's folder on this node, made when missing. Raises ConfigError."""
    folder = runtime_folder() / f"ray-{cluster}"
    make_private_folder(folder, "set XDG_RUNTIME_DIR to a folder that this user can write")
    added = {name: value for name, value in THREADS.items() if name not in environ}
    write_private(folder / "environment.json", json.dumps(added))
    return folder


def leave(cluster: str, environ: Mapping[str, str], deadline_s: float) -> bool:
    """Drain the workers of this node, which starts none before `join`, or before its machine or
    container starts again; whether they had ended at `deadline_s` of the monotonic clock. Raises
    ConfigError."""
    folder = node_folder(cluster, environ)
    write_private(folder / LEAVING, _machine_start())
    for lock in folder.glob("*.lock"):
        signal_supervisor(folder, lock.stem, signal.SIGTERM)
    return wait_unkept(folder, deadline_s)


def join(cluster: str, environ: Mapping[str, str]) -> None:
    """Let this node start workers again after `leave`. Raises ConfigError."""
    (node_folder(cluster, environ) / LEAVING).unlink(missing_ok=True)


def is_leaving(folder: Path) -> bool:
    """Whether `leave` was called since the machine or container started, and no `join` after it."""
    try:
        return (folder / LEAVING).read_text() == _machine_start()
    except FileNotFoundError:
        return False


def _machine_start() -> str:
    """Return when the first process of this machine or container began, in ticks (proc(5))."""
    return Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]


class Tending:
    """The lock of the process that tends a worker on this node, held from `claim` to `close`."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        path = tended_lock(folder, worker_id)
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def claim(self) -> bool:
        """Take the lock; False while another process holds it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._lock)
