"""The fault lab: one seed is one fleet, one load and its faults, and everything is checked.

    scenario ─▶ world + striker ─▶ clients ask, faults strike ─▶ all have ended ─▶ faults healed
      ─▶ quiet: nothing is held anywhere ─▶ a probe through each router ─▶ breaches, or none

A run that had too little load before its fault proves nothing: it is void, and counted so. A
failing seed is shown with the fewest events that still fail. Runs are independent; this module
owns one at a time.
"""

from __future__ import annotations

import asyncio
import gc
import random
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from baton.decode_worker.speculator import Speculator
from baton.runtime import waits
from baton.runtime.registry import Role
from baton.simulation.control.controlled_fleet import LabControllers
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.engine_kind import (
    DRAFTING_HASHES,
    HASHES,
    NARROW_HASHES,
    VOCAB,
    EngineKind,
)
from baton.simulation.fleet.faults import Striker
from baton.simulation.fleet.history import FINISHED, LEFT, ROUTER_LOST, Ask, History, serve
from baton.simulation.fleet.lab_vocabulary import lab_vocabulary
from baton.simulation.fleet.oracle_proposer import proposer_of
from baton.simulation.fleet.rolling_restart import end_lost
from baton.simulation.fleet.scenario import BLOCK, Event, Fault, Scenario
from baton.simulation.fleet.world import WorkerProcess, World
from baton.simulation.invariants import checks, rest
from baton.simulation.invariants.control import ControlRules
from baton.simulation.invariants.proposals import wrong_contents
from baton.simulation.virtual.loop_shortcuts import known, uncounted
from baton.simulation.virtual.virtual_loop import Deadlock, OutOfTime, VirtualLoop

END_S = 30.0  # all deadlines are over by then
QUIET_S = 12.0  # after the last end: leases, silences, a first contact's READ timeout
PROBE_S = 5.0
CHECK_EVERY_S = 0.1
DRAIN_BEGINS_S = 0.001  # a worker ordered to drain as the faults end has begun to
LEASE_LATE_S = 0.3  # its end by a slow clock, and the granter's last word
LIMIT_S = 200.0
# until the controllers' steps are over: one without an answer counts for 120 s, or for 20 s where
# its worker is as it was
SETTLE_S = 300.0
SETTLE_LOOK_S = 0.5
DRAFT_TOKENS = 4
LOAD_ASKED = 3  # requests that must have begun before the first fault, one of them open
MANY_EVENTS = 64


@dataclass(slots=True)
class Outcome:
    """One run. `ends` counts the requests by how they ended."""

    seed: int
    void: bool = False
    breaches: list[str] = field(default_factory=list)
    requests: int = 0
    faults: list[str] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    migrations: int = 0
    orders: int = 0  # of controllers, that workers accepted
    virtual_s: float = 0.0
    steps: int = 0  # of the loop


class Run:
    """A scenario on its way."""

    def __init__(self, scenario: Scenario, loop: VirtualLoop, kind: EngineKind) -> None:
        self.scenario = scenario
        self.outcome = Outcome(scenario.seed)
        self.histories: list[History] = []
        self._loop = loop
        dice = random.Random(scenario.seed ^ 0x5EED)
        self.world = World(
            loop, scenario.config, dice, kind, step_s=scenario.step_s, delay_s=scenario.delay_s
        )
        if scenario.named_hosts:
            self.world.host_of = str
        self.world.wide, self.world.sizes = scenario.wide, scenario.sizes
        if scenario.shared_registry:
            self.world.share_registry()
        if scenario.constrained:
            self.world.vocabulary = lab_vocabulary(VOCAB)
        if scenario.proposer is not None:
            proposer = proposer_of(scenario, kind)
            self.world.speculator = lambda: Speculator(proposer, DRAFT_TOKENS)
        if scenario.blocks_per_s is not None:
            self.world.exchange.bytes_per_s = scenario.blocks_per_s * kind.block_bytes(BLOCK)
        self._next_end: asyncio.Future[None] = loop.create_future()  # of a request
        self._left: list[str] = []  # that held something when it was last looked at
        self._watch = checks.Watch(self.world, loaded=scenario.control is None)
        self.world.started = self._watch.over
        self.world.lost = self._lost
        self.world.router_started = self._watch.over_router
        self._striker = Striker(
            self.world,
            dice,
            scenario.read_s,
            one_sided=scenario.one_sided,
            own_fabric=scenario.own_fabric,
        )
        if self._striker.redis is not None:
            self._striker.redis.over = self._watch.membership.over
        self._controlled: tuple[LabControllers, ControlRules] | None = None
        if scenario.control is not None:
            fleet = LabControllers(self.world, scenario.control, scenario.roles)
            self._controlled = fleet, ControlRules(self.world, fleet, self._watch.breaches)
            self._striker.add("control", fleet.strike)
        decide = self.world.exchange.decide
        self.world.exchange.decide = lambda attempt: self._watch.posted(attempt, decide(attempt))

    async def main(self) -> None:
        with self._watch.watching_grants():
            await self._main()

    async def _main(self) -> None:
        scenario, world = self.scenario, self.world
        for name, blocks in scenario.prefill.items():
            world.start_worker(name, "prefill", blocks)
        for name, blocks in scenario.decode.items():
            world.start_worker(name, "decode", blocks)
        for name in scenario.routers:
            world.start_router(name)
        if self._controlled is not None:
            self._controlled[0].start()
        for event in scenario.events:
            self._loop.call_world(event.at_s, self._do, event)
        last_s = max((event.at_s for event in scenario.events), default=0.0)
        await asyncio.sleep(last_s + 0.01)  # the last event has to strike
        self.note_load()
        await self._until_ended(self.histories, END_S)
        if self._controlled is not None:
            await self._settle(*self._controlled)
        self._striker.heal()
        await asyncio.sleep(DRAIN_BEGINS_S)  # the world comes to rest
        until_s = self._loop.world_s + QUIET_S
        while not self._is_quiet() and self._loop.world_s < until_s:
            await asyncio.sleep(CHECK_EVERY_S)  # no event tells of rest
        self._check_histories()  # by now a second end would have come
        self.outcome.breaches += [f"after {QUIET_S:g} s of quiet, {what}" for what in self._left]
        await self._probe()
        self.outcome.breaches += checks.of_world(world)
        if scenario.proposer is not None and world.kind.name == HASHES.name:
            for process in world.workers.values():
                if process.machine.alive:
                    self.outcome.breaches += wrong_contents(process, world.kind.slabs)
        self.outcome.breaches += self._watch.breaches

    async def _settle(self, fleet: LabControllers, rules: ControlRules) -> None:
        """Wait until the controllers' steps are over, and end the controllers."""
        until_s = self._loop.world_s + SETTLE_S
        while (left := rules.unsettled(self._striker.lasting)) and self._loop.world_s < until_s:
            await asyncio.sleep(SETTLE_LOOK_S)  # no event reports that a step is over
        self.outcome.breaches += [f"the controllers: after {SETTLE_S:g} s {what}" for what in left]
        self.outcome.orders = rules.orders
        fleet.stop()

    # -- events -----------------------------------------------------------------------------------

    def _do(self, event: Event) -> None:
        if isinstance(event.does, Ask):
            self._ask(event.does)
            return
        if not self.outcome.faults:
            self.note_load()
        self.outcome.faults.append(event.does.kind)
        self._watch.strikes(event.does)
        if self._controlled is not None:
            self._controlled[1].struck(event.does)
        self._striker.strike(event.does)
        if event.does.kind == "kill":
            self._router_lost(event.does)

    def _ask(self, ask: Ask) -> History:
        history = History(ask, len(self.histories), asked_s=self._loop.world_s)
        self.histories.append(history)
        router = self.world.routers[ask.router]
        history.rate = router.machine.rate
        if not router.machine.alive:
            self._end(history, ROUTER_LOST)
            return history
        work = serve(router, history, lambda: self._loop.world_s)
        history.task = router.machine.spawn(work, history.request_id)
        history.task.add_done_callback(lambda task: self._over(history, task))
        if ask.leaves_s is not None:
            self._loop.call_world(self._loop.world_s + ask.leaves_s, history.task.cancel)
        return history

    def _over(self, history: History, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            if not history.ends:  # before its first step
                self._end(history, LEFT)
        elif (error := task.exception()) is not None:
            self.outcome.breaches.append(f"{history.request_id} raised {error!r}")
        count = len(self.outcome.faults)
        self._reported_end()
        if history.ends and not self._striker.lasting:
            now_s = self._loop.world_s
            for role, after_s in self.scenario.stops_s.items():
                check = (self._check_stopped, history, count, role, after_s)
                self._loop.call_world(now_s + after_s, *check)

    def _check_stopped(self, history: History, faults: int, role: Role, after_s: float) -> None:
        """Unless a fault has struck since, or before and may have broken off a handoff: the
        lease ends that."""
        calm_s = self._loop.world_s - self._striker.over_s
        leased = role == "prefill" and calm_s < self.scenario.config.handoff.lease_s + LEASE_LATE_S
        if len(self.outcome.faults) == faults and not leased:
            self.outcome.breaches += self._watch.still_working(history, role, after_s)

    def _lost(self, process: WorkerProcess) -> None:
        """End a worker without its device as its process does, and replace it."""
        process.machine.spawn(end_lost(self.world, process), "end")

    def _router_lost(self, fault: Fault) -> None:
        (name,) = fault.targets
        for history in self.histories:
            if history.ask.router == name and not history.ends:
                self._end(history, ROUTER_LOST)

    # -- checks -----------------------------------------------------------------------------------

    def note_load(self) -> None:
        """Record the load as the first fault strikes, or at the end of the load without faults."""
        if self.outcome.void or self.outcome.requests:
            return
        self.outcome.requests = len(self.histories)
        open_ = sum(not history.ends for history in self.histories)
        without = not self.scenario.faults
        self.outcome.void = len(self.histories) < LOAD_ASKED or not (open_ or without)

    def _is_quiet(self) -> bool:
        self._left = rest.restless(self.world)
        return not self._left

    def _check_histories(self) -> None:
        outcome = self.outcome
        outcome.requests = len(self.histories)
        for history in self.histories:
            outcome.breaches += checks.of_history(history, self._excuse(history), self.world.kind)
            outcome.migrations += history.migrations
            for end in history.ends:
                outcome.ends[end] = outcome.ends.get(end, 0) + 1

    def _excuse(self, history: History) -> checks.Excuse:
        full = self._watch.refusals.explain(history)
        rules = None if self._controlled is None else self._controlled[1]
        alone = rules is not None and rules.excuse(history.asked_s, history.ended_s)
        return checks.Excuse(self._paused_s(history), history.rate, full, alone)

    def _paused_s(self, history: History) -> float:
        """Return how long its router may have been paused during the request."""
        paused_s = 0.0
        for event in self.scenario.faults:
            fault = event.does
            assert isinstance(fault, Fault)
            if fault.kind == "pause" and history.ask.router in fault.targets:
                over_s = min(event.at_s + fault.for_s, history.ended_s)
                paused_s += max(0.0, over_s - max(event.at_s, history.asked_s))
        return paused_s

    async def _probe(self) -> None:
        """Check that a request through each router is answered, after all that."""
        probes = [
            self._ask(Ask(router=name, prompt=tuple(range(9)), max_tokens=2, deadline_s=PROBE_S))
            for name in self.world.routers
        ]
        await self._until_ended(probes, 2 * PROBE_S)
        for probe in probes:
            found = list(checks.of_history(probe, self._excuse(probe), self.world.kind))
            if not found and probe.ends != [FINISHED]:
                found = [f"ended with {probe.ends} {probe.detail}"]
            self.outcome.breaches += [f"the probe at the end: {what}" for what in found]

    async def _until_ended(self, histories: Sequence[History], within_s: float) -> None:
        until_s = self._loop.world_s + within_s
        while not all(history.ends for history in histories) and self._loop.world_s < until_s:
            self._next_end = self._loop.create_future()
            await waits.done_within(self._next_end, until_s - self._loop.world_s)

    def _end(self, history: History, how: str) -> None:
        history.end(how, self._loop.world_s)
        self._reported_end()

    def _reported_end(self) -> None:
        if not self._next_end.done():
            self._next_end.set_result(None)


def _take_apart(world: World) -> None:
    """Break reference cycles: memory is then freed without the collector, which costs more."""
    world.reads.clear()
    for process in world.boots.values():
        vars(process.worker).clear()
    for router in world.routers.values():
        vars(router.dispatcher).clear()
        vars(router.fleet).clear()


def run(
    scenario: Scenario,
    mutation: Callable[[], AbstractContextManager[None]] = nullcontext,
    trace: list[str] | None = None,
    kind: EngineKind = HASHES,
) -> Outcome:
    """One run, always the same for the same scenario. `mutation` breaks the product for the run;
    `trace` gets a line for each callback."""
    if scenario.proposer == "draft" and kind is HASHES:
        kind = DRAFTING_HASHES
    if scenario.wide and kind is HASHES:
        kind = NARROW_HASHES
    scenario = scenario.computed_by(kind)
    random.seed(scenario.seed)  # the product's own dice: jitter
    loop = VirtualLoop(scenario.seed, shuffle=scenario.shuffle)
    loop.trace = trace
    gc.disable()  # a collection in the midst would end coroutines at another time in each run
    try:
        with mutation(), uncounted(), known(loop):
            current = Run(scenario, loop, kind)
            try:
                loop.run(current.main(), LIMIT_S + (SETTLE_S if scenario.control else 0.0))
            except (OutOfTime, Deadlock) as error:
                current.outcome.breaches.append(str(error))
            except Exception as error:  # the lab's own: a seed that shows it is shown like others
                at = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{at.name}:{at.lineno}"
                current.outcome.breaches.append(f"the lab raised {error!r} at {where}")
            finally:
                current.outcome.virtual_s, current.outcome.steps = loop.world_s, loop.steps
                loop.close()
                _take_apart(current.world)
    finally:
        gc.enable()
    return current.outcome


def run_seed(seed: int) -> Outcome:
    return run(draw(seed))


def shrink(
    scenario: Scenario,
    fails: Callable[[Scenario], bool],
) -> tuple[int, ...]:
    """The indices of fewest events that still fail, by leaving out one after the other until
    none can be left out."""
    kept = tuple(range(len(scenario.events)))
    again = True
    while again:
        again = False
        for index in reversed(kept):
            fewer = tuple(other for other in kept if other != index)
            if fails(scenario.only(fewer)):
                kept, again = fewer, True
    return kept
