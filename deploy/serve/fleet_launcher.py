"""Starts the workers of `baton serve` on all nodes of a running Ray, by a driver of `baton fleet`.

    baton serve ─▶ supervisor of fleet ─▶ baton fleet ─▶ Ray ─▶ actors on the nodes ─▶ workers
         └─▶ supervisor of router ─▶ router ◀──── Redis ◀───────────────────────────────┘

The workers register on a Redis server, since other nodes do not see this host's folder. They end
with `baton serve`: its end is the driver's SIGTERM, which drains them. What `baton fleet` refuses
(`worker.port` for all nodes, say) ends the driver, whose message `baton serve` shows.
"""

from __future__ import annotations

import os

from baton.deploy.host.fleet_end import DRIVER_END_S
from baton.deploy.host.instance import TOKEN_KEY, Instance, Job
from baton.deploy.serve.model_source import ModelSource
from baton.deploy.serve.plan import (
    EMBEDDED_BLOCKS,
    FLEET_JOB,
    ROUTER_JOB,
    ServeOptions,
    baton,
    grace_s,
)
from baton.deploy.serve.process_launcher import ProcessLauncher
from baton.runtime.errors import ConfigError

CPUS = 1  # of each rank
ROUTERS_OWN = ("router.api_keys", "router.host", "router.port", "router.grpc_port")


class FleetLauncher:
    """Keeps the router and the driver from this process. Raises ConfigError without a token, which
    the nodes have too."""

    def __init__(self, instance: Instance, options: ServeOptions, model: ModelSource) -> None:
        if not os.environ.get(TOKEN_KEY):
            raise ConfigError(
                f"{TOKEN_KEY} is not set, and workers on other nodes cannot read this host's: set "
                "it here and in the environment of each node"
            )
        job = Job(FLEET_JOB, fleet_command(options, model), grace_s(options.config) + DRIVER_END_S)
        instance.write_job(job)
        self._processes = ProcessLauncher(instance.folder, [ROUTER_JOB, FLEET_JOB])

    def tend(self) -> None:
        self._processes.tend()


def fleet_command(options: ServeOptions, model: ModelSource) -> tuple[str, ...]:
    """Return the command of the driver. The nodes get the settings of the command line alone."""
    config = options.config
    settings = {
        name: value
        for name, value in (options.flags or {}).items()
        if name not in (*ROUTERS_OWN, "registry.location")
    }
    if model.demonstration and not config.pool.blocks:
        settings["pool.blocks"] = str(EMBEDDED_BLOCKS)
    return baton(
        "fleet",
        *([] if model.demonstration else [str(model.folder)]),
        f"--ray-address={options.ray_address}",
        f"--registry={config.registry.location}",
        f"--prefill={options.prefill}",
        f"--decode={options.decode}",
        f"--cpus={CPUS}",
        f"--gpus={config.worker.tp if config.worker.device == 'cuda' else 0}",
        *(["--pack"] if options.pack else []),
        *(f"--set={name}={value}" for name, value in sorted(settings.items())),
    )
