"""The main of `baton fleet`: joins a Ray cluster, keeps a fleet on its nodes, ends it.

SIGTERM and SIGINT end the fleet: its workers drain. With `leaves` they end this process alone, and
the next one finds the workers. Its admin port has metrics. Runs on a node of the Ray cluster; knows
no model and no router.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from baton.deploy.control.fleet_number import FleetNumber, open_fleet_number
from baton.deploy.control.orders import Cluster, Target, order_drain
from baton.deploy.host.fleet_end import WORKERS_END_S
from baton.deploy.host.fleet_progress import WorkerProgress, check_start, write_fleet_progress
from baton.deploy.nodes.fleet_driver import TURN_S, FleetDriver
from baton.deploy.nodes.fleet_follower import FleetFollower
from baton.deploy.nodes.fleet_plan import FleetOptions
from baton.deploy.nodes.ray_fleet import RayFleet, namespace_of
from baton.deploy.processes.admin import AdminServer
from baton.deploy.serve.ray_driver import connect
from baton.runtime import logs
from baton.runtime.errors import BatonError, Unavailable
from baton.runtime.registry import WorkerRecord

log = logs.get(__name__)


class FleetStart:
    """The start of a fleet: for `baton serve` in a file, and bounded by `timeout_s`, if not 0."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline_s = time.monotonic() + timeout_s if timeout_s else None
        self._written: tuple[WorkerProgress, ...] = ()

    def look(self, workers: tuple[WorkerProgress, ...]) -> None:
        """Write what has changed. Raises BatonError for a start that has failed."""
        if workers != self._written:
            try:
                write_fleet_progress(workers)
                self._written = workers
            except OSError as error:  # a full disk ends no fleet; the next turn tries again
                log.warning("fleet progress not written", reason=str(error))
        if self._deadline_s is not None:
            overdue = time.monotonic() > self._deadline_s
            if overdue and not workers:
                raise Unavailable(
                    "the time of --start-timeout is over, and no worker is known: Ray has not "
                    "answered, or the number of workers was not read; the log has the reason"
                )
            check_start(workers, overdue=overdue)
            if workers and all(each.address for each in workers):
                self._deadline_s = None


@dataclass(frozen=True, slots=True)
class FleetProcess:
    """One run of `baton fleet`. `address` is Ray's; `leaves`: a signal ends no worker; `follows`: a
    controller may change the number of workers; `admin_port` 0: the system chooses one;
    `start_timeout_s` 0: workers have any time to get ready, and one that is given up is tried
    again."""

    options: FleetOptions
    cluster: Cluster
    address: str
    pack: bool = False
    leaves: bool = False
    follows: bool = False
    admin_port: int = 0
    start_timeout_s: float = 0.0

    def run(self) -> None:
        """Keep the fleet until a signal. Raises ConfigError for options that cannot work, or where
        Ray cannot be joined, and BatonError for a fleet that was not ready in `start_timeout_s`."""
        self.options.check()
        config = self.options.config
        logs.setup("fleet", config.telemetry.log_level)
        ray = connect(None, self.address, namespace_of(config.registry.cluster))
        try:
            asyncio.run(self._serve(RayFleet(ray, config.registry.cluster)))
        finally:
            ray.shutdown()

    async def _serve(self, fleet: RayFleet) -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        driver = FleetDriver(fleet, self.options.orders(), self._hosts, pack=self.pack)
        admin = self._admin(driver)
        address = await admin.start()
        counts = {"prefill": self.options.prefill, "decode": self.options.decode}
        log.info("fleet started", admin=address, **counts)
        shared = open_fleet_number(self.cluster) if self.follows else None
        try:
            await self._until_ended(driver, stopped, shared)
        finally:
            await admin.stop()
            if shared is not None:
                await shared.close()

    def _admin(self, driver: FleetDriver) -> AdminServer:
        def audit(check: bool) -> dict[str, Any]:
            found = driver.summary()
            ready = {each.order.worker_id: each.node for each in found.ready}
            return {"nodes": found.nodes, "ready": ready, "waiting": found.waiting}

        def not_ready() -> str | None:
            waiting = driver.summary().waiting
            return "; ".join(f"{name}: {reason}" for name, reason in waiting.items()) or None

        return AdminServer(
            self.options.config.worker.host,
            self.admin_port,
            audit,
            not_ready=not_ready,
            publish_gauges=driver.publish_gauges,
            port_option="--admin-port",
        )

    async def _until_ended(
        self, driver: FleetDriver, stopped: asyncio.Event, number: FleetNumber | None
    ) -> None:
        follower = None if number is None else FleetFollower(number, self.options)
        try:
            await self._turns(driver, stopped, follower)
        except BatonError:  # the start has failed; another error is a bug, and ends no worker
            await self._leave_or_end(driver, number)
            raise
        await self._leave_or_end(driver, number)

    async def _leave_or_end(self, driver: FleetDriver, number: FleetNumber | None) -> None:
        if self.leaves:
            log.info("fleet left", workers=driver.ready())
            return
        deadline_s = time.monotonic() + self.options.grace_s + WORKERS_END_S
        left = await asyncio.to_thread(driver.end, deadline_s)
        await drain_rest(self.cluster, driver.wanted())
        if number is not None:
            await self._clear(number)
        log.info("fleet ended", not_ended=left)

    async def _clear(self, number: FleetNumber) -> None:
        """Delete the number, so that the next fleet begins with its command line's."""
        try:
            await number.clear()
        except BatonError as error:
            log.warning("fleet number not deleted", reason=str(error))

    async def _turns(
        self, driver: FleetDriver, stopped: asyncio.Event, follower: FleetFollower | None
    ) -> None:
        failed: str | None = None
        ready: list[str] = []
        start = FleetStart(self.start_timeout_s)
        while not stopped.is_set():
            orders = None if follower is None else await follower.orders()
            if orders is not None:
                driver.follow(orders)
            try:
                if follower is None or orders is not None:
                    await asyncio.to_thread(driver.turn)
                failed = None
            except Unavailable as error:  # workers serve without Ray; it is asked again
                if str(error) != failed:
                    log.warning("ray unavailable", reason=str(error))
                failed = str(error)
            if driver.ready() != ready:
                ready = driver.ready()
                log.info("fleet changed", ready=ready, waiting=driver.waiting())
            start.look(driver.summary().progress)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN_S):
                    await stopped.wait()

    def _hosts(self) -> Mapping[str, str] | None:
        """Return where workers are registered, by worker id; None while the registry cannot be
        read."""
        try:
            records = self.cluster.workers()
        except Unavailable as error:
            log.warning("registry unavailable", reason=str(error))
            return None
        return {each.worker_id: each.host for each in records}


async def drain_rest(cluster: Cluster, wanted: Collection[str]) -> None:
    """Drain those of the `wanted` workers that are registered still, on nodes that Ray has lost:
    all at once, so that one that is lost itself holds up no other."""

    async def drain(record: WorkerRecord) -> None:
        try:
            await order_drain(Target(cluster, record))
        except BatonError as error:
            log.warning("worker not drained", worker=record.worker_id, reason=str(error))

    try:
        records = await cluster.read_workers()
    except Unavailable as error:
        log.warning("workers not drained", reason=str(error))
        return
    await asyncio.gather(*(drain(each) for each in records if each.worker_id in wanted))
