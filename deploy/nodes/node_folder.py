"""The folder on a node in which the keepers of a cluster's workers have their jobs, locks and logs.

    <runtime folder>/ray-<cluster>/    mode 0700; one for each node
      environment.json    what every worker adds to the node's environment; no secret
      <worker>.tended     flocked by the actor of Ray that tends the worker
      <worker>.lock       flocked by the keeper (instance.py has the other files)

A keeper outlives its actor. While no process holds the first lock it starts its worker no more, so
that Ray may have it started elsewhere. All that is needed to find a running worker again is here.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path

from baton.deploy.host.instance import (
    make_private_folder,
    runtime_folder,
    tended_lock,
    write_private,
)

THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}  # as `baton serve` sets them


def node_folder(cluster: str, environ: Mapping[str, str]) -> Path:
    """Return the cluster's folder on this node, made when missing. Raises ConfigError."""
    folder = runtime_folder() / f"ray-{cluster}"
    make_private_folder(folder, "set XDG_RUNTIME_DIR to a folder that this user can write")
    added = {name: value for name, value in THREADS.items() if name not in environ}
    write_private(folder / "environment.json", json.dumps(added))
    return folder


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
