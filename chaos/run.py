"""`make chaos`: every scenario several times on real processes, judged token by token.

    python -m chaos.run [--list] [--only NAMES] [--runs N] [--short] [--json FILE]

One fleet per transport serves all scenarios; each leaves it whole again, and one that cannot, or
fails itself, is reported as broken and the fleet is restarted. The load is 60 % of what the fleet
was measured to bear. Exit code 1 if a promise was not kept. What cannot be done here is skipped by
name. The file is written after every run, so that a run that is ended keeps it.
"""

from __future__ import annotations

from baton.runtime import tls_version  # noqa: F401  before anything imports grpc

# isort: split
import argparse
import asyncio
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from benchmarks.inputs.mixture_model import mixture_model
from chaos import held_thread, hosts, network, ray_nodes, small_disk
from chaos.answers import Answer
from chaos.asks import Ask, asks, long_asks, right_answers
from chaos.clients import Clients, Outcome, capacity, offer
from chaos.cluster import Cluster, ClusterError, end_cleanly, here
from chaos.hosts import Hosts, running_hosts
from chaos.network import Network
from chaos.report import report, write
from chaos.scenarios import ALL, SHORT
from chaos.small_disk import SmallDisk
from chaos.stage import Scenario, Stage
from chaos.verdict import LEAST_BEFORE, Moments, Verdict, judge

API_KEY = "a-key-of-clients"
SEED = 5
LOAD_SHARE = 0.6
RANK_LOAD_SHARE = 0.3  # what one of two decode workers can bear
HOSTS_LOAD_SHARE = 0.4  # what two of three hosts can bear
NO_LOAD_S = 20.0
LATER_S = 30.0  # for what was left: a leak does not go
NOT_BACK = (ClusterError, httpx.HTTPError, subprocess.TimeoutExpired)
SETTINGS = (
    "worker.deterministic=true",  # else a near tie could fall another way in another batch
    "router.placement=disaggregated",
    f"router.api_keys={API_KEY}",
    "router.leave_s=0.5",
    "router.grpc_port=0",
    "pool.blocks=320",
    "step.chunk_tokens=64",  # long prompts take many steps, so that a fault finds them under way
    "step.prefill_tokens=128",
)
ALONE = tuple(setting for setting in SETTINGS if not setting.startswith("router."))


@dataclass(frozen=True, slots=True)
class RunSize:
    """How large the fleet is and how long each part takes. `per_s` 0: measured.
    `asks` is odd, so that each of them is asked by gRPC too."""

    prefill: int = 2
    decode: int = 3
    routers: int = 2
    asks: int = 41
    longs: int = 16
    runs: int = 3
    before_s: float = 3.5
    settle_s: float = 3.5
    most_hold_s: float = 60.0
    measure_s: float = 9.0
    at_once: int = 24
    per_s: float = 0.0


RANK_ASKS = 15
FULL = RunSize()
SHORT_SIZE = RunSize(
    decode=2, asks=15, longs=11, runs=1, before_s=1.5, settle_s=2.0, most_hold_s=3.0, per_s=6.0
)


class Chaos:
    """Runs the scenarios of one kind of fleet. `right`: the answer to every ask. `verdicts` and
    `per_s`, by fleet, get what is found. `after_each` is called after each run."""

    def __init__(
        self,
        size: RunSize,
        folder: Path,
        right: Mapping[int, Answer],
        after_each: Callable[[], None],
        verdicts: list[Verdict],
        per_s: dict[str, float],
    ) -> None:
        self.per_s = per_s
        self.verdicts = verdicts
        self._size = size
        self._folder = folder
        self._right = right
        self._after_each = after_each
        self._asks, self._longs = wanted(size)

    def all_of(self, scenarios: Sequence[Scenario]) -> None:
        """Every scenario, on one fleet as long as it lasts."""
        left = [(scenario, run) for scenario in scenarios for run in range(self._size.runs)]
        while left:
            with contextlib.ExitStack() as held:
                fleet = self._fleet(held, scenarios)
                while left:
                    scenario, run = left.pop(0)
                    verdict = self._timed(fleet, scenario, run)
                    say(verdict)
                    self.verdicts.append(verdict)
                    self._after_each()
                    if any(line.startswith("the fleet") for line in verdict.broken):
                        break

    def _timed(self, fleet: Fleet, scenario: Scenario, run: int) -> Verdict:
        began_s = time.monotonic()
        try:
            verdict = asyncio.run(self._once(fleet, scenario, run))
        except Exception as error:  # of the scenario's own making: the others go on
            traceback.print_exc()
            no_moments = Moments(0.0, 0.0, 0.0)
            verdict = judge(scenario.name, run, (), no_moments, {}, redundant=scenario.redundant)
            verdict.broken.append(f"the fleet could not be judged: {error!r}")
        verdict.took_s = time.monotonic() - began_s
        return verdict

    def _fleet(self, held: contextlib.ExitStack, scenarios: Sequence[Scenario]) -> Fleet:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(dir=self._folder)))
        first = scenarios[0]
        kind, ranks, transport = first.fleet, first.ranks, first.transport
        net = None if transport == "memory" else held.enter_context(Network())
        needed = any(scenario.needs == "disk" for scenario in scenarios)
        disk = held.enter_context(SmallDisk(folder)) if needed else None
        settings = (*SETTINGS, *split_settings(ranks, first.ep))
        size, many = self._size, None
        if net is not None and transport in ("hosts", "lone-router", "ray"):
            running = running_hosts(
                net,
                folder,
                settings,
                with_ray=transport == "ray",
                lone_router=transport == "lone-router",
            )
            many = held.enter_context(running)
            cluster = many.cluster
        else:
            site = net.add if net else here
            cluster = Cluster(folder, settings, site, model_for(first.ep, self._folder))
            held.callback(cluster.close)
            cluster.start(size.prefill, size.decode, size.routers)
        fleet = Fleet(cluster, net, disk, many)
        if kind not in self.per_s:
            share = LOAD_SHARE if ranks == 1 else RANK_LOAD_SHARE
            share = HOSTS_LOAD_SHARE if many else share
            self.per_s[kind] = size.per_s or share * self._capacity(fleet)
            print(f"{kind}: load {self.per_s[kind]:.1f}/s", flush=True)
        return fleet

    def _capacity(self, fleet: Fleet) -> float:
        """Requests a second, measured and reported."""
        found = asyncio.run(self._measured(fleet))
        print(f"capacity {found:.1f}/s with {self._size.at_once} clients at once", flush=True)
        return found

    async def _measured(self, fleet: Fleet) -> float:
        async with self._clients(fleet, 60.0) as clients:
            size = self._size
            return await capacity(
                clients, self._asks, clients_at_once=size.at_once, for_s=size.measure_s
            )

    def _clients(self, fleet: Fleet, deadline_s: float) -> Clients:
        cluster = fleet.cluster
        return Clients(
            cluster.urls,
            self._right,
            deadline_s=deadline_s,
            api_key=API_KEY,
            grpc_addresses=cluster.grpc_addresses,
        )

    async def _once(self, fleet: Fleet, scenario: Scenario, run: int) -> Verdict:
        clock = asyncio.get_running_loop().time
        async with self._clients(fleet, scenario.deadline_s) as clients:
            stage = Stage(
                cluster=fleet.cluster,
                clients=clients,
                asks=self._asks,
                longs=self._longs,
                hold_s=min(scenario.hold_s, self._size.most_hold_s),
                network=fleet.network,
                disk=fleet.disk,
                hosts=fleet.hosts,
            )
            over, began_s = asyncio.Event(), clock()
            per_s = self.per_s[scenario.fleet]
            offering = asyncio.create_task(offer(clients, self._asks, per_s, over))
            # The load has to run before the fault.
            await asyncio.sleep(self._size.before_s)
            await self._is_loaded(clients, began_s + self._size.before_s + NO_LOAD_S)
            fault_s, left = clock(), dict[str, int]()
            try:
                await scenario.inject(stage)
                # The fleet has to settle under load before it is judged.
                await asyncio.sleep(self._size.settle_s + scenario.settle_s)
            except Exception as error:  # whatever it is, what clients saw until then is judged
                stage.broken.append(f"the fleet did not come back: {error!r}")
            over_s = clock()
            over.set()
            await asyncio.gather(*await offering)
            try:
                left = await self._left(stage, scenario.quiet_s)
            except NOT_BACK as error:
                stage.broken.append(f"the fleet does not tell what it holds: {error!r}")
            moments = Moments(began_s, fault_s, over_s)
            verdict = judge(
                scenario.name, run, clients.traces, moments, left,
                redundant=scenario.redundant, may_cut=scenario.may_cut,
            )  # fmt: skip
        verdict.broken += stage.broken
        verdict.notes += stage.notes
        verdict.void = verdict.void or stage.void
        return verdict

    async def _is_loaded(self, clients: Clients, until_s: float) -> None:
        """A fault is to find a request in the middle of an answer, and others before it that were
        answered; without, the run is void."""
        clock = asyncio.get_running_loop().time
        while clock() < until_s:
            answered = sum(trace.outcome is Outcome.RIGHT for trace in clients.traces)
            under_way = any(trace.outcome is None and trace.tokens for trace in clients.traces)
            if answered >= LEAST_BEFORE and under_way:
                return
            # Clients are many, and which of them answers first is open.
            await asyncio.sleep(0.01)

    async def _left(self, stage: Stage, quiet_s: float) -> dict[str, int]:
        if stage.broken:
            return {}
        left = await stage.do(stage.cluster.left_over, quiet_s)
        if left:  # it is broken; a leak, or only late?
            stage.notes += [f"{name} holds {json.dumps(audit)}" for name, audit in left.items()]
            leaked = await stage.do(stage.cluster.left_over, LATER_S)
            stage.notes.append(
                f"still so {LATER_S:g} s later: {', '.join(leaked) or 'none, it was only late'}"
            )
        states = ("used", "leased", "pinned", "quarantined")
        return {name: sum(a["blocks"][s] for s in states) for name, a in left.items()}


@dataclass(frozen=True, slots=True)
class Fleet:
    cluster: Cluster
    network: Network | None
    disk: SmallDisk | None
    hosts: Hosts | None = None


def size_for(ranks: int, size: RunSize) -> RunSize:
    """Return the size of a fleet of workers with so many ranks: each takes the cores of several."""
    if ranks == 1:
        return size
    return replace(size, prefill=1, decode=2, asks=min(size.asks, RANK_ASKS), longs=0)


def split_settings(ranks: int, ep: int) -> tuple[str, str]:
    return f"worker.tp={ranks}", f"worker.ep={ep}"


def model_for(ep: int, folder: Path) -> Path | None:
    """Return a mixture, kept in `folder`, for workers with groups of experts; None: embedded."""
    return mixture_model(folder / "mixture") if ep > 1 else None


def wanted(size: RunSize) -> tuple[list[Ask], list[Ask]]:
    return asks(size.asks, SEED), long_asks(size.longs, SEED, size.asks)


def say(verdict: Verdict) -> None:
    state = "void" if verdict.void else "BROKEN" if verdict.broken else "kept"
    took = verdict.recovery.seconds
    voids = [verdict.void] if verdict.void else []
    heard = "never" if took is None else f"{took:.1f} s"
    print(
        f"{verdict.scenario} run {verdict.run + 1}: {state}; {verdict.requests} requests, "
        f"recovered {heard}, disturbed {verdict.recovery.disturbed_s:.1f} s, "
        f"took {verdict.took_s:.0f} s " + "; ".join([*verdict.notes, *voids, *verdict.broken[:5]]),
        flush=True,
    )


def skipped(scenarios: Sequence[Scenario]) -> dict[str, str]:
    """Why scenarios cannot be run here, by name."""
    causes = {
        "tcp": network.unavailable, "disk": small_disk.unavailable,
        "trace": held_thread.unavailable, "hosts": hosts.unavailable,
        "lone-router": hosts.unavailable, "ray": hosts.ray_unavailable,
    }  # fmt: skip
    needed = {need for scenario in scenarios for need in _needs(scenario)}
    missing = {need: why for need in needed if (why := causes[need]())}
    found = {}
    for scenario in scenarios:
        if whys := [missing[need] for need in _needs(scenario) if need in missing]:
            found[scenario.name] = "; ".join(whys)
    return found


def _needs(scenario: Scenario) -> list[str]:
    return [need for need in (scenario.transport, scenario.needs) if need not in ("memory", None)]


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description="Faults on real processes, judged token by token.")
    made.add_argument("--list", action="store_true", help="the scenarios, and end")
    made.add_argument("--only", default="", metavar="NAMES", help="scenarios, as a,b")
    made.add_argument("--runs", type=int, default=0, metavar="N", help="of each (default: 3)")
    made.add_argument("--short", action="store_true", help="a small fleet, few scenarios, once")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there too")
    options = made.parse_args(arguments)
    if options.list:
        for scenario in ALL:
            print(f"{scenario.name:<22}{scenario.fault}")
        return 0
    names = options.only.split(",") if options.only else list(SHORT) if options.short else []
    known = {scenario.name: scenario for scenario in ALL}
    if unknown := [name for name in names if name not in known]:
        made.error(f"no scenario is called {', '.join(unknown)}: {', '.join(known)}")
    chosen = [known[name] for name in names] or list(ALL)
    end_cleanly()
    size = SHORT_SIZE if options.short else FULL
    if options.runs:
        size = replace(size, runs=options.runs)
    return _run(chosen, size, options.json)


def _run(chosen: Sequence[Scenario], size: RunSize, json_file: Path | None) -> int:
    for owner in (network, small_disk, ray_nodes):
        for left in owner.remove_leftovers():
            print(f"removed what a killed run left: {left}", flush=True)
    passed_over = skipped(chosen)
    for name, why in passed_over.items():
        print(f"skipped: {name}: {why}", flush=True)
    with tempfile.TemporaryDirectory(prefix=small_disk.FOLDER_PREFIX) as text:
        folder = Path(text)
        verdicts, per_s = list[Verdict](), dict[str, float]()

        @functools.cache
        def right(ranks: int, ep: int) -> dict[int, Answer]:
            usual, longs = wanted(size_for(ranks, size))
            settings, model = (*ALONE, *split_settings(ranks, ep)), model_for(ep, folder)
            return right_answers([*usual, *longs], settings, folder, model)

        def keep() -> None:
            if json_file is not None:
                write(json_file, chosen, verdicts, passed_over, per_s)

        began_s = time.monotonic()
        try:
            for fleet in dict.fromkeys(s.fleet for s in chosen):
                scenarios = [s for s in chosen if s.fleet == fleet and s.name not in passed_over]
                if not scenarios:
                    continue
                ranks, ep = scenarios[0].ranks, scenarios[0].ep
                own = size_for(ranks, size)
                try:
                    Chaos(own, folder, right(ranks, ep), keep, verdicts, per_s).all_of(scenarios)
                except NOT_BACK as error:  # the next fleet may start
                    print(f"{fleet}: no fleet: {error!r}", flush=True)
        finally:  # ended from outside, it reports what it has seen
            code = report(chosen, verdicts, passed_over, per_s)
            keep()
            print(f"{(time.monotonic() - began_s) / 60:.1f} minutes", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
