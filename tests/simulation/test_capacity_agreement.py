"""The capacity simulator beside the real workers on virtual time: same steps, same requests.

Real workers plan one step while another runs, and an idle one probes itself: a sequence may join
its batch some steps later there. Times agree within that, and so does the order of what ends apart.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.engine.scheduling.batch import StepBatch
from baton.planner.timing_model import (
    ChunkTiming,
    StepTiming,
    StepWork,
    TimingModel,
    causal_pairs,
)
from baton.planner.traces import BLOCK_TOKENS, TraceRequest
from baton.runtime.config import Config, HandoffConfig, PoolConfig
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.client import Request as ClientRequest
from baton.simulation.fleet.cluster import Cluster
from baton.simulation.virtual.virtual_time import at_the_end, on_virtual_time

TIMING = TimingModel(
    "agreement", 1000.0, chunk=ChunkTiming(0.005, 1e-4), step=StepTiming(0.01, 0.001)
)
LATE_STEPS = 4  # that a sequence may join later: the step under way, the one planned, probes


def drawn(seed: int) -> list[TraceRequest]:
    rng = random.Random(seed)
    arrivals = sorted(rng.uniform(0, 1.0) for _ in range(8))
    return [
        TraceRequest(at_s - arrivals[0], rng.randint(600, 1500), rng.randint(1, 25))
        for at_s in arrivals
    ]


def step_s(batch: StepBatch) -> float:
    spans = [(item.start, item.start + len(item.tokens)) for item in batch.slices]
    prompts = [(start, end) for start, end in spans if end - start > 1]
    rows = [end for start, end in spans if end - start == 1]
    work = StepWork(
        sum(end - start for start, end in prompts),
        sum(causal_pairs(start, end) for start, end in prompts),
        len(rows),
        sum(rows),
    )
    return TIMING.step_s(work)


async def ends_of_workers(trace: list[TraceRequest], layout: Layout) -> list[tuple[int, float]]:
    """Return each request's tokens and time of its end, by real workers on a simulated device."""
    settings = Config(
        pool=PoolConfig(block_size=BLOCK_TOKENS), step=layout.steps(), handoff=HandoffConfig()
    )
    cluster = Cluster(settings, step_s)
    at_the_end(cluster.close)
    for number in range(layout.prefill):
        cluster.add_prefill(f"p{number}", layout.blocks)
    cluster.add_decode("d0", layout.blocks)
    client, loop = Client(cluster, "d0"), asyncio.get_running_loop()
    await asyncio.sleep(1.0)  # their first probes are over
    for number in (8, 9):  # the next step is planned at once until two have been measured
        prompt = [1000 * number + place for place in range(1500)]
        warm_up = client.submit(prompt, max_tokens=1, local=not layout.prefill)
        await warm_up.finished(60.0)
    started_s = loop.time()

    async def ended(request: ClientRequest) -> tuple[int, float]:
        await request.finished(60.0)
        return len(request.tokens()), loop.time() - started_s

    tasks = []
    for number, asked in enumerate(trace):
        await asyncio.sleep(max(0.0, asked.arrived_s - (loop.time() - started_s)))
        prompt = [1000 * number + place % 997 for place in range(asked.prompt_tokens)]
        request = client.submit(prompt, max_tokens=asked.output_tokens, local=not layout.prefill)
        tasks.append(asyncio.create_task(ended(request)))
    found = [await task for task in tasks]
    await cluster.quiet()
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "layout",
    [
        Layout(prefill=1, decode=1, pool_tokens=64 * BLOCK_TOKENS, chunk_tokens=1024),
        Layout(colocated=1, pool_tokens=64 * BLOCK_TOKENS, local_chunk_tokens=1024),
    ],
    ids=["disaggregated", "colocated"],
)
@on_virtual_time
async def test_real_workers_end_the_same_in_the_same_order(layout: Layout, seed: int) -> None:
    trace = drawn(seed)
    real = await ends_of_workers(trace, layout)
    simulated = run_fleet(CapacityScenario(layout), TIMING, trace).records
    assert [tokens for tokens, _ in real] == [record.tokens for record in simulated]
    longest_s = TIMING.step_s(StepWork(1024 if layout.colocated else 0, 0, len(trace), 0))
    late_s = LATE_STEPS * longest_s
    differences = [end_s - record.end_s for (_, end_s), record in zip(real, simulated, strict=True)]
    assert max(map(abs, differences)) <= late_s, differences
    for first, (_, first_s) in zip(simulated, real, strict=True):
        for second, (_, second_s) in zip(simulated, real, strict=True):
            if first.end_s + late_s < second.end_s:
                assert first_s < second_s
