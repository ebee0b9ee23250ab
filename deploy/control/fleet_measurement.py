"""A running fleet as one value, from the workers' reports and a router's traces: what advice needs.

    Status of each worker ─▶ layout, steps ─▶ timing model ─┐
    traces of the routers ─▶ traffic, TTFT, ITL ────────────┴▶ MeasuredFleet

All workers of a role count as alike: pools, limits of a step and speeds are those of the smallest
and of all together. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from baton.planner.controller_load import FleetSample, WorkerSample
from baton.planner.step_samples import StepLimits, fit_steps_together
from baton.planner.traced_requests import (
    TracedRequest,
    common_block_tokens,
    host_samples,
    kv_bytes_per_token,
    traced_requests,
    transfer_samples,
)
from baton.planner.traces import BLOCK_TOKENS
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError
from baton.simulation.capacity.layout import Layout, Objectives
from baton.simulation.capacity.live_advice import MIN_REQUESTS, MeasuredFleet

WINDOW_S = 600.0  # of traffic, back from the last request
MAX_REQUESTS = 600  # simulated a dozen times
MIN_SAMPLES = 2  # of transfers and of the router's time, for a fit
BLOCKS_OF_A_PROMPT = 16  # in the simulation: more blocks cost time and change little


def measured_fleet(
    sample: FleetSample, records: Sequence[Mapping[str, Any]], config: Config
) -> MeasuredFleet:
    """Return the fleet, with the objectives and the placement of the settings. Raises ConfigError
    if too little is known of it, with what is missing."""
    requests = recent(traced_requests(records))
    prefill, decode = (sample.of(role, "ready") for role in ("prefill", "decode"))
    workers = [*prefill, *decode]
    if not decode:
        raise ConfigError("no decode worker answers: see `baton cluster status` or `baton ps`")
    layout = _layout(prefill, decode, requests)
    steps = [step for each in workers for step in each.recent_steps]
    others = [*transfer_samples(requests), *host_samples(requests)]
    kept = [each for each in others if _count(others, each.kind) >= MIN_SAMPLES]
    size = decode[0].block_tokens
    fit = fit_steps_together("this fleet", kv_bytes_per_token(requests, size), steps, kept)
    objectives = Objectives(config.slo.ttft_s or math.inf, config.slo.itl_s or math.inf)
    return MeasuredFleet(
        layout,
        fit,
        requests,
        objectives,
        speculates=any(each.verifying_steps for each in decode),
        narrow_kv=any(each.narrow_kv for each in decode),
        placement=config.router.placement,
    )


def recent(requests: Sequence[TracedRequest]) -> list[TracedRequest]:
    """Return the last requests of WINDOW_S, MAX_REQUESTS at most. Raises ConfigError if there are
    fewer than MIN_REQUESTS."""
    last_s = requests[-1].begun_wall_s if requests else 0.0
    found = [each for each in requests if each.begun_wall_s >= last_s - WINDOW_S]
    if len(found) < MIN_REQUESTS:
        raise ConfigError(
            f"{len(found)} requests finished within {WINDOW_S:.0f} s, and advice needs "
            f"{MIN_REQUESTS}: ask again when there was more traffic"
        )
    return found[-MAX_REQUESTS:]


def _layout(
    prefill: Sequence[WorkerSample], decode: Sequence[WorkerSample], requests: list[TracedRequest]
) -> Layout:
    decoding = _limits(decode)
    computing = _limits(prefill) if prefill else decoding
    return Layout(
        prefill=len(prefill),
        decode=len(decode) if prefill else 0,
        colocated=0 if prefill else len(decode),
        pool_tokens=min(each.kv_tokens for each in decode),
        chunk_tokens=computing.chunk_tokens,
        prefill_tokens=computing.prefill_tokens,
        local_chunk_tokens=decoding.local_prefill_tokens,
        max_sequences=decoding.max_sequences,
        block_tokens=_block_tokens(decode[0].block_tokens, requests),
    )


def _block_tokens(size: int, requests: list[TracedRequest]) -> int:
    """Return the power of two to simulate blocks by: the workers' own, or larger ones where prompts
    have many."""
    mean = sum(each.prompt_tokens for each in requests) / len(requests)
    wanted = max(float(size), mean / BLOCKS_OF_A_PROMPT)
    most = common_block_tokens(requests) or BLOCK_TOKENS
    return min(most, 1 << int(math.log2(max(1.0, wanted))))


def _limits(workers: Sequence[WorkerSample]) -> StepLimits:
    for each in workers:
        if each.step_limits is not None:
            return each.step_limits
    raise ConfigError(
        f"{workers[0].worker_id} does not report its steps: start workers of this version of Baton"
    )


def _count(samples: Sequence[Any], kind: str) -> int:
    return sum(each.kind == kind for each in samples)
