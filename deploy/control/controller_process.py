"""The main of `baton controller`: the role loop of one cluster, with an admin port for its metrics.

SIGTERM and SIGINT end it; a change that it has ordered goes on without it, since the worker carries
it out. Knows no model and starts no worker.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from typing import Any

from baton.deploy.control.controller_memory import ControllerMemory
from baton.deploy.control.fleet_reports import FleetReports
from baton.deploy.control.leadership import FileLeadership, Leadership, RedisLeadership
from baton.deploy.control.orders import Cluster, order_role
from baton.deploy.control.role_loop import RoleLoop
from baton.deploy.processes.admin import AdminServer
from baton.planner.change_history import RoleStep
from baton.planner.controller import RoleController
from baton.planner.controller_forecast import ServiceGoals
from baton.runtime import logs
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError
from baton.runtime.shared_registry.registry_location import folder_of, key_prefix, open_server

log = logs.get(__name__)


def service_goals(config: Config) -> ServiceGoals:
    """Return the objectives of the settings. Raises ConfigError if there is none."""
    slo = config.slo
    if not (slo.ttft_s or slo.itl_s):
        raise ConfigError(
            "slo.ttft_s and slo.itl_s are 0: the controller needs an objective, such as "
            "--set slo.ttft_s=2 --set slo.itl_s=0.05"
        )
    return ServiceGoals(slo.ttft_s or math.inf, slo.itl_s or math.inf, config.step.max_sequences)


def run_controller(config: Config, cluster: Cluster, *, acts: bool, port: int) -> None:
    """Serve until SIGTERM. Raises ConfigError without an objective, or for a port in use."""
    goals = service_goals(config)
    logs.setup("controller", config.telemetry.log_level)
    asyncio.run(_serve(config, cluster, goals, acts=acts, port=port))


async def _serve(
    config: Config, cluster: Cluster, goals: ServiceGoals, *, acts: bool, port: int
) -> None:
    reports = FleetReports(cluster, time.monotonic)

    async def order(step: RoleStep, term: int) -> None:
        await order_role(reports.target(step.boot_id), step.role, term)

    controller = RoleController(goals)
    leadership = leadership_of(cluster)
    memory = ControllerMemory(leadership, cluster.secrets.accepted)
    loop = RoleLoop(reports, controller, memory, order, time.monotonic, acts=acts)

    def audit(check: bool) -> dict[str, Any]:
        return {"acts": acts, "term": leadership.term, "decision": loop.report()}

    admin = AdminServer(
        config.worker.host, port, audit, not_ready=lambda: None, port_option="--port"
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    address = await admin.start()
    log.info("controller started", cluster=cluster.name, admin=address, acts=acts)
    try:
        await loop.run(stopped)
    finally:
        await reports.close()
        await admin.stop()


def leadership_of(cluster: Cluster) -> Leadership:
    """Return the lock of the cluster's registry. Raises ConfigError."""
    folder = folder_of(cluster.registry)
    if folder is not None:
        return FileLeadership(folder)
    client, _ = open_server(cluster.registry, cluster.security)
    return RedisLeadership(client, key_prefix(cluster.registry), time.monotonic)
