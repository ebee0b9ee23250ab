"""The capacity simulator beside the real router and workers on virtual time: same steps, same
requests, same times."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from baton.planner.timing_model import (
    ChunkTiming,
    StepTiming,
    StepWork,
    TimingModel,
)
from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import BLOCK_TOKENS, TraceRequest, in_order
from baton.router.requests.request_trace import NAME_BYTES
from baton.runtime.config import Config, HandoffConfig, PlacementMode, PoolConfig
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout
from baton.simulation.capacity.request_record import RequestRecord
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.client import Request as ClientRequest
from baton.simulation.fleet.cluster import Cluster
from tests.support.timed_fleet import Served, batch_seconds, serve_traffic
from tests.support.virtual_time import at_the_end, on_virtual_time

TIMING = TimingModel(
    "agreement", 1000.0, chunk=ChunkTiming(0.005, 1e-4), step=StepTiming(0.01, 0.001)
)
SLOW = TimingModel("slow", 256.0, ChunkTiming(0.04, 5e-4), StepTiming(0.05, 2e-3))
LATE_STEPS = 1  # that a sequence may join later
SEEDS = 500
WORKERS = {
    "disaggregated": Layout(prefill=1, decode=1, pool_tokens=64 * BLOCK_TOKENS, chunk_tokens=1024),
    "colocated": Layout(colocated=1, pool_tokens=64 * BLOCK_TOKENS, local_chunk_tokens=1024),
}
SIZE = Layout(
    colocated=1, pool_tokens=65_536, chunk_tokens=512, local_chunk_tokens=256, block_tokens=16
)


def nightly(layout: Layout, seed: int) -> object:
    """A case that repeats another with other sizes: one of each kind is in `make test`."""
    return pytest.param(layout, seed, marks=pytest.mark.nightly)


def drawn(seed: int) -> list[TraceRequest]:
    rng = random.Random(seed)
    arrivals = sorted(rng.uniform(0, 1.0) for _ in range(8))
    return [
        TraceRequest(at_s - arrivals[0], rng.randint(600, 1500), rng.randint(1, 25))
        for at_s in arrivals
    ]


async def ends_of_workers(trace: list[TraceRequest], layout: Layout) -> list[tuple[int, float]]:
    """Return each request's tokens and time of its end, by real workers on a simulated device."""
    settings = Config(
        pool=PoolConfig(block_size=BLOCK_TOKENS), step=layout.steps(), handoff=HandoffConfig()
    )
    cluster = Cluster(settings, partial(batch_seconds, TIMING))
    at_the_end(cluster.close)
    for number in range(layout.prefill):
        cluster.add_prefill(f"p{number}", layout.blocks)
    cluster.add_decode("d0", layout.blocks)
    client, loop = Client(cluster, "d0"), asyncio.get_running_loop()
    await asyncio.sleep(1.0)  # their first probes are over
    started_s = loop.time()

    async def ended(request: ClientRequest) -> tuple[int, float]:
        await request.finished(60.0)
        return len(request.tokens()), loop.time() - started_s

    tasks = []
    for number, asked in enumerate(trace):
        await asyncio.sleep(max(0.0, asked.arrived_s - (loop.time() - started_s)))
        prompt = [1000 * number + index % 997 for index in range(asked.prompt_tokens)]
        request = client.submit(prompt, max_tokens=asked.output_tokens, local=not layout.prefill)
        tasks.append(asyncio.create_task(ended(request)))
    found = [await task for task in tasks]
    await cluster.quiet()
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """`difference_s` is the largest of the times at which a request ended, `late_s` what a sequence
    may join later. `reversed_pairs` ended in the other order though they lay further apart."""

    same_tokens: bool
    difference_s: float
    late_s: float
    reversed_pairs: int


def compared(layout: Layout, seed: int) -> Comparison:
    trace, real = drawn(seed), list[tuple[int, float]]()

    @on_virtual_time
    async def served() -> None:
        real.extend(await ends_of_workers(trace, layout))

    served()
    placement: PlacementMode = "disaggregated" if layout.prefill else "local"
    simulated = run_fleet(CapacityScenario(layout, placement=placement), TIMING, trace).records
    both = [(end_s, record.end_s) for (_, end_s), record in zip(real, simulated, strict=True)]
    step_s = TIMING.step_s(StepWork(1024 if layout.colocated else 0, 0, len(trace), 0))
    late_s = LATE_STEPS * step_s
    return Comparison(
        same_tokens=[tokens for tokens, _ in real] == [record.tokens for record in simulated],
        difference_s=max(abs(real_s - simulated_s) for real_s, simulated_s in both),
        late_s=late_s,
        reversed_pairs=sum(
            real_s >= other_s and simulated_s + late_s < other_simulated_s
            for real_s, simulated_s in both
            for other_s, other_simulated_s in both
        ),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", WORKERS.values(), ids=WORKERS)
def test_real_workers_end_the_same_in_the_same_order(layout: Layout, seed: int) -> None:
    found = compared(layout, seed)
    assert found.same_tokens and not found.reversed_pairs
    assert found.difference_s <= found.late_s


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "unlike_runs"), [("disaggregated", 3), ("colocated", 0)])
def test_500_seeds_agree_on_counts_and_order(name: str, unlike_runs: int) -> None:
    """In a few runs two handoffs end at one instant, of which the simulator takes one after the
    other: the second sequence joins a step later, or a prompt misses a chunk."""
    layout = WORKERS[name]
    runs = {seed: compared(layout, seed) for seed in range(SEEDS)}
    assert [seed for seed, found in runs.items() if not found.same_tokens] == []
    unlike = {
        seed: found
        for seed, found in runs.items()
        if found.difference_s > found.late_s or found.reversed_pairs
    }
    assert len(unlike) <= unlike_runs, unlike


@pytest.mark.parametrize(
    ("layout", "seed"),
    [
        nightly(replace(SIZE, prefill=1, decode=1, colocated=0), 1),
        (replace(SIZE, prefill=2, decode=2, colocated=0), 2),
        nightly(replace(SIZE, prefill=3, decode=1, colocated=0, max_sequences=8), 3),
        nightly(replace(SIZE, colocated=2), 4),
        nightly(replace(SIZE, colocated=4), 6),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_a_routed_fleet_takes_the_simulated_times(layout: Layout, seed: int) -> None:
    """Placements on loads that are as old as the last reports, plans ahead of a step's end, and
    handoffs give the times of the product, whose router knows its workers' times as the
    simulator does: the limits leave room for ties of placement alone."""
    text = "requests={},rate={},prompt=lognormal:250:0.6,output=exponential:40,seed={}"
    traffic = draw_trace(text.format(120, 0.9 * layout.workers, seed))
    placement: PlacementMode = "disaggregated" if layout.prefill else "local"
    real = serve_traffic(layout, SLOW, traffic, placement)
    scenario = CapacityScenario(layout, placement=placement)
    simulated = run_fleet(scenario, SLOW, traffic).records
    compare(real, simulated)


def shared_names(real: Sequence[Served], size: int) -> int:
    """Return how many names of blocks of `size` tokens several traces have."""
    found = Counter(
        served.block_names[at : at + NAME_BYTES]
        for served in real
        if served.named_tokens == size
        for at in range(0, len(served.block_names), NAME_BYTES)
    )
    return sum(count > 1 for count in found.values())


def compare(real: Sequence[Served], simulated: Sequence[RequestRecord]) -> None:
    assert [each.tokens for each in real] == [each.tokens for each in simulated]
    for times, limit in (
        (([r.ttft_s for r in real], [r.ttft_s for r in simulated]), 0.02),
        (([r.mean_gap_s for r in real], [r.mean_gap_s for r in simulated]), 0.02),
    ):
        measured, predicted = (float(np.mean(each)) for each in times)
        assert predicted == pytest.approx(measured, rel=limit)
    p99s = [np.percentile([r.ttft_s for r in found], 99) for found in (real, simulated)]
    assert p99s[1] == pytest.approx(p99s[0], rel=0.05)


def conversations(seed: int) -> list[TraceRequest]:
    """Return turns of conversations, each with the blocks of the turn before and one more."""
    rng, found = random.Random(seed), list[TraceRequest]()
    for number in range(30):
        arrived_s = rng.uniform(0, 60)
        for turn in range(1, 5):
            blocks = tuple(100 * number + index for index in range(turn))
            prompt = turn * BLOCK_TOKENS + rng.randint(20, 200)
            found.append(TraceRequest(arrived_s, prompt, rng.randint(5, 40), blocks))
            arrived_s += rng.uniform(4, 12)
    return in_order(found)


@pytest.mark.parametrize(
    "layout",
    [
        replace(SIZE, prefill=2, decode=2, colocated=0),
        pytest.param(replace(SIZE, colocated=3), marks=pytest.mark.nightly),
    ],
    ids=lambda layout: str(layout.name),
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_shared_prefixes_are_hit_and_read_as_in_a_routed_fleet(layout: Layout, seed: int) -> None:
    """Prefill workers READ what other workers hold of a conversation; colocated ones keep it."""
    traffic = conversations(seed)
    real = serve_traffic(layout, SLOW, traffic, "auto" if layout.prefill else "local")
    simulated = run_fleet(CapacityScenario(layout), SLOW, traffic).records
    assert sum(each.cached_tokens for each in simulated) > 0
    assert all(each.named_tokens for each in real) and shared_names(real, 32) > 100
    compare(real, simulated)


@pytest.mark.nightly
def test_a_router_that_learns_soon_places_like_one_that_knows() -> None:
    """Its first placements are by the prior; the second half of the requests is compared."""
    layout = replace(SIZE, prefill=2, decode=2, colocated=0)
    text = "requests=160,rate=3,prompt=lognormal:250:0.6,output=exponential:40,seed=7"
    traffic = draw_trace(text)
    knows = serve_traffic(layout, SLOW, traffic, "auto")
    learns = serve_traffic(layout, SLOW, traffic, "auto", learns=True)
    known_s, learned_s = (
        float(np.mean([each.ttft_s for each in found[80:]])) for found in (knows, learns)
    )
    assert learned_s == pytest.approx(known_s, rel=0.1)
