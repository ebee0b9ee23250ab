"""A router and workers on virtual time whose steps take the times of a timing model.

All of it is the product but the device and the network: what the capacity simulator leaves out of
messages, reports and pipelines is in here, and no noise of a machine is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from opentelemetry.context import Context

from baton.engine.scheduling.batch import StepBatch
from baton.planner.timing_model import StepWork, TimingModel
from baton.planner.traces import BLOCK_TOKENS, TraceRequest
from baton.proto import worker_pb2
from baton.router.fleet.fleet_timing import FleetTiming
from baton.router.fleet.worker_costs import WorkerCosts
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime.config import Config, PlacementMode, PoolConfig, StepConfig
from baton.runtime.worker.attention_pairs import causal_pairs
from baton.simulation.capacity.layout import Layout
from baton.simulation.fleet.world import RouterProcess, World
from baton.simulation.virtual.machine import Machine
from baton.simulation.virtual.virtual_loop import VirtualLoop

SETTLE_S = 2.0  # until each worker is linked
AFTER_REPORTS_S = 0.0001
DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Served:
    """One request as its client saw it, in seconds from its arrival."""

    arrived_s: float
    ttft_s: float
    mean_gap_s: float  # 0 with a single token
    end_s: float
    tokens: int
    block_names: bytes  # as its trace has them, each for `named_tokens`
    named_tokens: int


@dataclass(slots=True)
class TimedWorld(World):
    """A world without noise: steps take `seconds_of`, all clocks are the world's."""

    seconds_of: Callable[[StepBatch], float] = lambda batch: 0.0

    def _step_time_s(self, machine: Machine, batch: StepBatch) -> float:
        return self.seconds_of(batch)

    def new_machine(self, name: str) -> Machine:
        return Machine(name, name)


class KnownTiming(FleetTiming):
    """The timing of workers whose steps take what the model says: nothing is left to learn, as in
    the capacity simulator."""

    def __init__(self, step: StepConfig, timing: TimingModel) -> None:
        super().__init__(step)
        self._known = timing
        self._growth_tokens = step.expected_growth_tokens
        self._costs: dict[str, WorkerCosts] = {}

    def costs_of(self, worker_id: str, hello: worker_pb2.WorkerHello) -> WorkerCosts:
        if hello.role not in self._costs:
            sizes = hello.step_tokens, hello.chunk_tokens
            self._costs[hello.role] = WorkerCosts(self._known, 1.0, *sizes, self._growth_tokens)
        return self._costs[hello.role]


def batch_seconds(timing: TimingModel, batch: StepBatch) -> float:
    """Return the modelled seconds of a step. A slice of one token is one that decodes."""
    spans = [(piece.start, piece.start + len(piece.tokens)) for piece in batch.slices]
    prompts = [(start, end) for start, end in spans if end - start > 1]
    contexts = [end for start, end in spans if end - start == 1]
    work = StepWork(
        sum(end - start for start, end in prompts),
        sum(causal_pairs(start, end) for start, end in prompts),
        len(contexts),
        sum(contexts),
    )
    return timing.step_s(work)


def _prompt(number: int, asked: TraceRequest) -> tuple[int, ...]:
    """Return the tokens of a request: those of its named blocks, and others of its own."""
    seeds = [f"block {name}" for name in asked.blocks] + [f"own {number}"]
    tokens: list[int] = []
    for index, seed in enumerate(seeds):
        left = asked.prompt_tokens - len(tokens)
        dice, count = random.Random(seed), left if index == len(asked.blocks) else BLOCK_TOKENS
        tokens += [dice.randrange(1000) for _ in range(min(left, count))]
    return tuple(tokens)


def serve_traffic(
    layout: Layout,
    timing: TimingModel,
    traffic: Sequence[TraceRequest],
    placement: PlacementMode,
    seed: int = 0,
    *,
    learns: bool = False,
) -> list[Served]:
    """Return each request of the traffic, in its order. The router knows the timing of its workers,
    or `learns` it from their first step on."""
    config = Config()
    config = replace(
        config,
        pool=PoolConfig(block_size=layout.block_tokens),
        step=layout.steps(),
        router=replace(config.router, placement=placement),
    )
    loop = VirtualLoop(seed)
    try:
        return loop.run(_served(loop, config, layout, timing, traffic, seed, learns))
    finally:
        loop.close()


async def _served(
    loop: VirtualLoop,
    config: Config,
    layout: Layout,
    timing: TimingModel,
    traffic: Sequence[TraceRequest],
    seed: int,
    learns: bool,
) -> list[Served]:
    world = TimedWorld(
        loop,
        config,
        random.Random(seed),
        delay_s=1e-5,
        seconds_of=lambda batch: batch_seconds(timing, batch),
    )
    for number in range(layout.prefill):
        world.start_worker(f"p{number}", "prefill", layout.blocks)
    for number in range(layout.decode + layout.colocated):
        world.start_worker(f"d{number}", "decode", layout.blocks)
    router = world.start_router("r0")
    if not learns:
        router.fleet.timing = KnownTiming(config.step, timing)
    for process in world.workers.values():
        for watch in process.watches:
            watch.cancel()  # its probes: a trace's steps follow each other
    await asyncio.sleep(SETTLE_S)
    heartbeat_s = config.router.link_heartbeat_s
    reported_s = max(link.joined_s for link in router.fleet.links()) % heartbeat_s
    await asyncio.sleep((reported_s - loop.time()) % heartbeat_s + AFTER_REPORTS_S)
    begun_s = loop.world_s  # the workers have just reported, as at the start of a simulation

    spawn = router.machine.spawn
    found: dict[int, Served] = {}

    async def kept(number: int, asked: TraceRequest) -> None:
        found[number] = await _request(loop, router, begun_s, number, asked)

    tasks = [spawn(kept(n, asked), f"request {n}") for n, asked in enumerate(traffic)]
    for task in tasks:
        await task
    return [found[number] for number in range(len(traffic))]


async def _request(
    loop: VirtualLoop, router: RouterProcess, begun_s: float, number: int, asked: TraceRequest
) -> Served:
    """Send a request of the trace when it is due, and measure its answer."""
    request = ValidatedRequest(
        prompt=_prompt(number, asked),
        sampling=worker_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
        max_tokens=asked.output_tokens,
    )
    await asyncio.sleep(begun_s + asked.arrived_s - loop.world_s)
    arrived_s = loop.world_s
    active = await router.dispatcher.start(
        request, f"request-{number}", Context(), loop.time() + DEADLINE_S
    )
    first_s, tokens = 0.0, 0
    while outputs := await active.next():
        first_s = first_s or loop.world_s
        tokens += sum(output.token is not None for output in outputs)
        last_s = loop.world_s
    gap_s = (last_s - first_s) / (tokens - 1) if tokens > 1 else 0.0
    names, named = active.trace.block_names, active.trace.named_tokens
    ttft_s, end_s = first_s - arrived_s, last_s - arrived_s
    return Served(arrived_s - begun_s, ttft_s, gap_s, end_s, tokens, names, named)
