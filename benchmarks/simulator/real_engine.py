"""Layouts of two workers that really compute, a core each: the simulator against all of a fleet.

    traffic for the fit ─▶ prefill and decode worker ─▶ timing model ─┐
    other traffic ─▶ each layout ─▶ measured times    simulated times ◀┘

A random bf16 model of 0.1 B parameters, one thread a worker; router and client take what the two
cores have left. The rate follows from the time of a prompt on an idle fleet.
"""

from __future__ import annotations

from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import TraceRequest
from baton.simulation.capacity.layout import Layout, Objectives
from benchmarks.fleets.served_fleet import ServedFleet
from benchmarks.fleets.sleeping_fleet import LayoutRun, known_fleet
from benchmarks.inputs.cached_model import cached_model

POOL_TOKENS = 65_536
CHUNKS = ("step.chunk_tokens=512", "step.prefill_tokens=512", "step.local_prefill_tokens=128")
LAYOUTS = (
    Layout(prefill=1, decode=1, pool_tokens=POOL_TOKENS, block_tokens=16),
    Layout(colocated=2, pool_tokens=POOL_TOKENS, block_tokens=16),
)
PROMPT_TOKENS = 250
BUSY = 0.35  # of a worker, with prompts alone
FITTED_ON = "requests={count},rate={rate},prompt=lognormal:200:0.8,output=exponential:30"
TRAFFIC = "requests={count},rate={rate},prompt=lognormal:250:0.6,output=exponential:40"


def measure_real(layout: Layout, trace: str, count: int, objectives: Objectives) -> LayoutRun:
    """Serve so many requests of the described traffic with one layout. Raises RuntimeError if it
    does not come up or a request fails."""
    settings = [f"pool.blocks={POOL_TOKENS // 16}", "pool.block_size=16", *CHUNKS]
    settings.append(f"slo.itl_s={objectives.itl_s}")
    workers = (layout.prefill, layout.decode + layout.colocated)
    with ServedFleet(cached_model("0.1b"), *workers, settings) as fleet:
        fleet.send([TraceRequest(0.0, PROMPT_TOKENS, 8)] * 8, seed=1)  # each meets each other
        (alone,) = fleet.send([TraceRequest(0.0, PROMPT_TOKENS, 2)], seed=2)
        traffic = draw_trace(trace.format(count=count, rate=BUSY / alone.ttft_s))
        measured = fleet.send(traffic, seed=3)
        found = known_fleet(fleet.cluster(), fleet.console, count, objectives)
    return LayoutRun(found.layout, measured, found)
