"""`baton advise`: reads a running fleet, simulates changes of it, and says what to change.

    once: read ─▶ simulate ─▶ print            --watch: the same every PERIOD_S, posted to the
                                                        consoles of the routers it was read from

Simulations run in a thread of this process, so a router and its workers pay for two answers alone.
Changes nothing of the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.deploy.control.fleet_measurement import measured_fleet
from baton.deploy.control.fleet_reports import FleetReports
from baton.deploy.control.orders import Cluster
from baton.deploy.control.router_admin import RouterAdmin
from baton.planner.timing_file import write_fit
from baton.planner.traced_requests import traffic_of
from baton.planner.traces import write_traffic
from baton.runtime import logs
from baton.runtime.config import Config
from baton.runtime.errors import BatonError, ConfigError
from baton.simulation.capacity.advice_text import advice_json, advice_table
from baton.simulation.capacity.live_advice import FleetAdvice, MeasuredFleet, advise

ANSWER_S = 10.0  # of a busy worker: no turn of a controller waits for it
PERIOD_S = 60.0  # from the end of one advice to the next reading

log = logs.get(__name__)


class Adviser:
    """Reads one cluster and its routers. `close` ends the connections to workers."""

    def __init__(self, cluster: Cluster, routers: Sequence[RouterAdmin], config: Config) -> None:
        self._reports = FleetReports(cluster, time.monotonic, ANSWER_S)
        self._routers = routers
        self._config = config

    async def read(self) -> MeasuredFleet:
        """Read the fleet, and fit its timing model. Raises Unavailable if something does not
        answer, ConfigError if too little is known."""
        answers = await asyncio.gather(
            *(asyncio.to_thread(router.traces) for router in self._routers)
        )
        sample = await self._reports.read()
        records = [record for answer in answers for record in answer]
        return await asyncio.to_thread(measured_fleet, sample, records, self._config)

    async def advise(self) -> tuple[MeasuredFleet, FleetAdvice]:
        """Read and simulate. Raises like `read`."""
        fleet = await self.read()
        return fleet, await asyncio.to_thread(advise, fleet)

    async def post(self, advice: dict[str, Any]) -> None:
        """Show advice in the console of each router."""
        for router in self._routers:
            await asyncio.to_thread(router.post_advice, advice)

    async def close(self) -> None:
        await self._reports.close()


def run_once(
    config: Config,
    cluster: Cluster,
    routers: Sequence[RouterAdmin],
    *,
    as_json: bool,
    save: Path | None = None,
) -> None:
    """Print the advice; write what it was computed from into the folder `save`. Raises
    BatonError."""
    fleet, advice = asyncio.run(_once(Adviser(cluster, routers, config)))
    if save is not None:
        save_fleet(fleet, save)
    if as_json:
        print(json.dumps(advice_json(fleet, advice, time.time()), indent=2))
    else:
        print(advice_table(fleet, advice))


def read_fleet(config: Config, cluster: Cluster, routers: Sequence[RouterAdmin]) -> MeasuredFleet:
    """Return a running fleet with the timing model that is fitted to what it recorded. Raises
    BatonError."""

    async def read() -> MeasuredFleet:
        adviser = Adviser(cluster, routers, config)
        try:
            return await adviser.read()
        finally:
            await adviser.close()

    return asyncio.run(read())


def save_fleet(fleet: MeasuredFleet, folder: Path) -> None:
    """Write timing.json and traffic.jsonl, as `baton simulate` and `baton tune` take them. Raises
    ConfigError if they cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_fit(fleet.fit, folder / "timing.json")
        write_traffic(traffic_of(fleet.requests), folder / "traffic.jsonl")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error


def run_watch(config: Config, cluster: Cluster, routers: Sequence[RouterAdmin]) -> None:
    """Advise until SIGTERM or SIGINT. What cannot be read is logged, and read again later."""
    logs.setup("adviser", config.telemetry.log_level)
    asyncio.run(_watch(Adviser(cluster, routers, config)))


async def _once(adviser: Adviser) -> tuple[MeasuredFleet, FleetAdvice]:
    try:
        return await adviser.advise()
    finally:
        await adviser.close()


async def _watch(adviser: Adviser) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        while not stopped.is_set():
            await advise_and_post(adviser)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await stopped.wait()
    finally:
        await adviser.close()


async def advise_and_post(adviser: Adviser) -> None:
    """Advise once, and show it in the consoles; log the reason if there is no advice."""
    try:
        fleet, advice = await adviser.advise()
        content = advice_json(fleet, advice, time.time())
        await adviser.post(content)
    except BatonError as error:
        log.warning("advice not made", reason=str(error))
        return
    for finding in content["findings"]:
        log.info("advice posted", level_of_finding=finding["level"], finding=finding["text"])
