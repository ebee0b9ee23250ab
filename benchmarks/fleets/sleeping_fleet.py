"""A router process before sleeping workers, under open-loop load: one layout with some traffic.

`measure` starts the processes, sends the traffic as a client of the API, reads the router's traces
and the workers' reports as `baton advise` does, and ends the processes.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.deploy.bench.answer import Measurement
from baton.deploy.bench.bench_run import BenchPlan, RequestForm, run_bench
from baton.deploy.bench.http_client import ServerAddress
from baton.deploy.bench.load import Load
from baton.deploy.control.fleet_measurement import measured_fleet
from baton.deploy.control.fleet_reports import FleetReports
from baton.deploy.control.orders import Cluster
from baton.deploy.control.router_admin import RouterAdmin
from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.planner.controller_load import FleetSample
from baton.planner.timing_file import write_fit
from baton.planner.timing_fit import Fit
from baton.planner.timing_model import TimingModel
from baton.planner.traces import TraceRequest
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig, SloConfig
from baton.runtime.config import Config, PlacementMode
from baton.simulation.capacity.layout import Layout, Objectives
from baton.simulation.capacity.live_advice import MeasuredFleet
from benchmarks.fleets.routed_workers import MODEL, RoutedWorkers
from benchmarks.fleets.served_fleet import KEY, TOKEN_IDS

SETTLE_S = 3.0  # for links and first contacts


@dataclass(frozen=True, slots=True)
class LayoutRun:
    """One layout under load: what its clients measured, and what advice is computed from."""

    layout: Layout
    measurements: list[Measurement]
    fleet: MeasuredFleet

    def good_share(self, objectives: Objectives) -> float:
        """Return the share of all requests that met the objectives."""
        good = sum(
            not each.error and objectives.met_by(each.ttft_s, each.mean_gap_s)
            for each in self.measurements
        )
        return good / len(self.measurements)


def measure(
    layout: Layout,
    timing: TimingModel,
    traffic: Sequence[TraceRequest],
    objectives: Objectives,
    entry: Sequence[str] = (),
    *,
    placement: PlacementMode = "auto",
) -> LayoutRun:
    """Send the traffic to a fleet of this layout, whose router knows the objective for ITL and
    places prompts by `placement`. `entry`: see `RoutedWorkers`. Raises RuntimeError if the fleet
    does not come up."""
    itl_s = 0.0 if math.isinf(objectives.itl_s) else objectives.itl_s
    with tempfile.TemporaryDirectory(prefix="baton-benchmark-") as folder:
        file = Path(folder) / "timing.json"
        write_fit(Fit(timing), file)
        workers = RoutedWorkers(
            _arguments(layout, file),
            settings=[
                f"step.max_sequences={layout.max_sequences}",
                f"slo.itl_s={itl_s}",
                f"router.placement={placement}",
            ],
            entry=entry,
            admin_key=KEY,
            module="benchmarks.fleets.sleeping_workers",
        )
        try:
            workers.wait_workers(layout.workers)
            address = workers.start_router()
            time.sleep(SETTLE_S)  # the router links its workers; it reports no end of that
            plan = BenchPlan(
                ServerAddress.parse(f"http://{address}", None),
                RequestForm(MODEL, chat=False),
                Load([*_opening(layout), *_after(traffic, SETTLE_S)]),
                warm_up=len(_opening(layout)),
                token_ids=TOKEN_IDS,
            )
            result = run_bench(plan, lambda done, total: None)
            measured = [each for each in result.measurements if not each.warm_up]
            console = f"http://{workers.admin_address}"
            fleet = known_fleet(_cluster(workers), console, len(measured), objectives)
        finally:
            workers.close()
    return LayoutRun(layout, measured, fleet)


def _arguments(layout: Layout, timing: Path) -> list[str]:
    return [
        f"--timing={timing}",
        f"--prefill={layout.prefill}",
        f"--decode={layout.decode + layout.colocated}",
        f"--blocks={layout.pool_tokens // 16}",
        f"--chunk-tokens={layout.chunk_tokens}",
        f"--local-chunk-tokens={layout.local_chunk_tokens}",
        f"--max-sequences={layout.max_sequences}",
    ]


def _opening(layout: Layout) -> list[TraceRequest]:
    """Return requests after which every worker has met every other: they are not measured."""
    return [TraceRequest(0.05 * n, 80, 2) for n in range(2 * layout.workers)]


def _after(traffic: Sequence[TraceRequest], seconds: float) -> list[TraceRequest]:
    return [
        TraceRequest(each.arrived_s + seconds, each.prompt_tokens, each.output_tokens)
        for each in traffic
    ]


def known_fleet(
    cluster: Cluster, console: str, requests: int, objectives: Objectives
) -> MeasuredFleet:
    """Return what `baton advise` would know of a fleet now, from its last requests."""
    records = RouterAdmin(console, KEY).traces()[:requests]
    sample = asyncio.run(_reports(cluster))
    slo = SloConfig(ttft_s=objectives.ttft_s, itl_s=objectives.itl_s)
    return measured_fleet(sample, records, Config(slo=slo))


async def _reports(cluster: Cluster) -> FleetSample:
    reports = FleetReports(cluster, time.monotonic)
    try:
        return await reports.read()
    finally:
        await reports.close()


def _cluster(workers: RoutedWorkers) -> Cluster:
    secrets = ClusterSecrets((workers.token,), workers.token)
    registry = RegistryConfig(location=str(workers.registry))
    return Cluster("benchmark", registry, secrets, SecurityConfig(tls="off"))
