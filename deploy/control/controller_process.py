"""The main of `baton controller`: the role loop of one cluster, with an admin port for its metrics.

SIGTERM and SIGINT end it; a change that it has ordered goes on without it, since the worker carries
it out. With a `FleetPlan` it asks for more or fewer workers too. Knows no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from baton.deploy.control.fleet_number import open_fleet_number
from baton.deploy.control.fleet_reports import FleetReports
from baton.deploy.control.kubernetes_calls import API_TIMEOUT_S
from baton.deploy.control.orders import Cluster, order_leave, order_role
from baton.deploy.control.raycluster_workers import RayClusterWorkers
from baton.deploy.control.resize_target import ResizeTarget
from baton.deploy.control.stateful_set_scale import StatefulSetScale
from baton.deploy.host.kubernetes_api import KubernetesApi, api_server, own_namespace
from baton.deploy.processes.admin import AdminServer
from baton.planner.change_history import RoleStep
from baton.planner.control.controller_memory import ControllerMemory
from baton.planner.control.leadership import FileLeadership, Leadership, RedisLeadership
from baton.planner.control.role_loop import RoleLoop
from baton.planner.control.size_loop import SizeLoop
from baton.planner.control.size_step import WorkerPool
from baton.planner.controller import RoleController
from baton.planner.controller_forecast import ServiceGoals
from baton.planner.fleet_size import SizeBounds, SizeController
from baton.runtime import logs
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError
from baton.runtime.shared_registry.registry_location import folder_of, key_prefix, open_server

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The target that is asked for workers, the bounds of their number, and the longest start of
    one. The pods of one in Kubernetes are of this pod's namespace, and have all workers of the
    cluster."""

    target: ResizeTarget
    bounds: SizeBounds
    start_s: float


def service_goals(config: Config) -> ServiceGoals:
    """Return the objectives of the settings. Raises ConfigError if there is none."""
    slo = config.slo
    if not (slo.ttft_s or slo.itl_s):
        raise ConfigError(
            "slo.ttft_s and slo.itl_s are 0: the controller needs an objective, such as "
            "--set slo.ttft_s=2 --set slo.itl_s=0.05"
        )
    return ServiceGoals(slo.ttft_s or math.inf, slo.itl_s or math.inf, config.step.max_sequences)


def run_controller(
    config: Config, cluster: Cluster, *, acts: bool, port: int, fleet: FleetPlan | None = None
) -> None:
    """Serve until SIGTERM. Raises ConfigError without an objective, for a port in use, or for a
    fleet outside a pod that has a service account."""
    goals = service_goals(config)
    logs.setup("controller", config.telemetry.log_level)
    reports = FleetReports(cluster, time.monotonic)
    pool = None if fleet is None else _pool_of(fleet.target, cluster, reports)
    asyncio.run(_serve(config, reports, goals, _Actions(acts, fleet, pool), port))


@dataclass(frozen=True, slots=True)
class _Actions:
    """Which actions the controller may take: role changes, and another number of workers."""

    acts: bool
    fleet: FleetPlan | None
    pool: WorkerPool | None


def _pool_of(target: ResizeTarget, cluster: Cluster, reports: FleetReports) -> WorkerPool:
    if target.kind == "fleet":
        return open_fleet_number(cluster)
    api = KubernetesApi(*api_server(os.environ), timeout_s=API_TIMEOUT_S)
    if target.kind == "statefulset":
        return StatefulSetScale(api, own_namespace(), target.name)
    number = open_fleet_number(cluster)
    return RayClusterWorkers(api, own_namespace(), target, number, reports.hosts)


async def _serve(
    config: Config, reports: FleetReports, goals: ServiceGoals, actions: _Actions, port: int
) -> None:
    cluster = reports.cluster

    async def order(step: RoleStep, term: int) -> None:
        await order_role(reports.target(step.boot_id), step.role, term)

    async def drain(boot_id: str) -> None:
        await order_leave(reports.target(boot_id))

    controller = RoleController(goals)
    leadership = leadership_of(cluster)
    memory = ControllerMemory(leadership, cluster.secrets.accepted)
    sizes = None
    if actions.fleet is not None and actions.pool is not None:
        decider = SizeController(actions.fleet.bounds)
        sizes = SizeLoop(actions.pool, decider, drain, time.monotonic, actions.fleet.start_s)
    loop = RoleLoop(
        reports, controller, memory, order, time.monotonic, acts=actions.acts, sizes=sizes
    )

    def audit(check: bool) -> dict[str, Any]:
        found = {"acts": actions.acts, "term": leadership.term, "decision": loop.report()}
        return found if sizes is None else {**found, "size": loop.size_report()}

    admin = AdminServer(
        config.worker.host, port, audit, not_ready=lambda: None, port_option="--port"
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    address = await admin.start()
    log.info("controller started", cluster=cluster.name, admin=address, acts=actions.acts)
    async with contextlib.AsyncExitStack() as closing:
        closing.push_async_callback(admin.stop)
        closing.push_async_callback(reports.close)
        await loop.run(stopped)


def leadership_of(cluster: Cluster) -> Leadership:
    """Return the lock of the cluster's registry. Raises ConfigError."""
    folder = folder_of(cluster.registry)
    if folder is not None:
        return FileLeadership(folder)
    client, _ = open_server(cluster.registry, cluster.security)
    return RedisLeadership(client, key_prefix(cluster.registry), time.monotonic)
