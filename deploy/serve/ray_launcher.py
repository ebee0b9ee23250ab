"""Starts supervisors through Ray: actors in a placement group, one per worker.

`baton serve` itself never imports Ray, because a Ray driver dies with Ray's head. It keeps one
more job instead, the Ray driver (`python -m baton.deploy.serve.ray_driver`), which starts or joins
a cluster and makes the actors:

    baton serve ─▶ supervisor of ray ─▶ driver ─▶ Ray ─▶ actor ─▶ supervisor of decode-0 ─▶ decode-0
         └─▶ supervisor of router ─▶ router

Actors supervise, nothing else: no prompt and no token passes through Ray. A supervisor is no child
of its actor, so losing actor, raylet or head stops no worker; a re-made actor finds the supervisor
at its lock and adopts it. Workers end with the instance's lifeline. Because registry and
lifeline are files, all workers run on this host; the placement group asks for it by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.deploy.host.instance import Instance, Job
from baton.deploy.serve.process_launcher import ProcessLauncher

RAY_JOB = "ray"
GRACE_S = 2.0  # a local Ray takes nine seconds to end gracefully, and holds nothing of ours


class RayLauncher:
    """Keeps `local` jobs from this process and `placed` jobs through Ray.

    `address` is Ray's own (host:port, `auto`, ray://...); empty: a local Ray is started, and
    stopped with the instance. `placed` has the GPUs of each job.
    """

    def __init__(
        self,
        instance: Instance,
        local: Sequence[str],
        placed: Mapping[str, float],
        address: str,
    ) -> None:
        folder = instance.folder
        instance.write_job(Job(RAY_JOB, driver_command(folder, placed, address), GRACE_S))
        self._processes = ProcessLauncher(folder, [*local, RAY_JOB])

    def tend(self) -> None:
        self._processes.tend()


def driver_command(folder: Path, placed: Mapping[str, float], address: str) -> tuple[str, ...]:
    return (
        sys.executable,
        "-P",
        "-m",
        "baton.deploy.serve.ray_driver",
        str(folder),
        "--address",
        address,
        *(f"{name}={gpus:g}" for name, gpus in placed.items()),
    )
