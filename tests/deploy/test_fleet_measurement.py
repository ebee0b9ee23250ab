"""What advice is computed from: layout, timing and traffic, of reports and traces."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from baton.deploy.control.fleet_measurement import MAX_REQUESTS, WINDOW_S, measured_fleet, recent
from baton.planner.controller_load import FleetSample, WorkerRole, WorkerSample
from baton.planner.step_samples import StepLimits, StepSample
from baton.planner.timing_model import ChunkTiming, StepTiming, StepWork, TimingModel
from baton.planner.traced_requests import traced_requests
from baton.runtime.cluster_config import SloConfig
from baton.runtime.config import Config, RouterConfig
from baton.runtime.errors import ConfigError
from tests.support.json_values import JsonObject
from tests.support.traced_records import record

TRUE = TimingModel("true", 1.0, ChunkTiming(0.01, 1e-4), StepTiming(0.02, 1e-3))
LIMITS = StepLimits(512, 256, 128, 64)
SETTINGS = Config(slo=SloConfig(ttft_s=0.5, itl_s=0.0))


def steps(*, prompts: bool, decodes: bool) -> tuple[StepSample, ...]:
    rng, found = random.Random(1), []
    for _ in range(20):
        tokens = rng.randint(16, 256) if prompts else 0
        work = StepWork(tokens, 0, rng.randint(1, 9) if decodes else 0, 0)
        found.append(StepSample(work, TRUE.step_s(work)))
    return tuple(found)


def worker(name: str, role: WorkerRole, **fields: Any) -> WorkerSample:
    own = steps(prompts=role == "prefill", decodes=role == "decode")
    size: dict[str, Any] = {"kv_tokens": 8192, "block_tokens": 16}
    size |= {"recent_steps": own, "step_limits": LIMITS}
    return WorkerSample(name, name, role, **{"state": "ready", **size, **fields})


def sample(*workers: WorkerSample) -> FleetSample:
    return FleetSample(0.0, workers)


PAIR = (worker("p0", "prefill"), worker("d0", "decode"))
RECORDS = [record(float(n)) for n in range(30)]


def test_the_layout_is_that_of_the_workers_that_are_ready() -> None:
    gone = worker("d1", "decode", state="draining")
    smaller = worker("d2", "decode", kv_tokens=4096)
    fleet = measured_fleet(sample(*PAIR, gone, smaller), RECORDS, SETTINGS)
    layout = fleet.layout
    assert (layout.prefill, layout.decode, layout.colocated) == (1, 2, 0)
    assert (layout.chunk_tokens, layout.prefill_tokens) == (256, 512)
    assert (layout.pool_tokens, layout.max_sequences, layout.block_tokens) == (4096, 64, 16)
    assert fleet.objectives.ttft_s == 0.5 and fleet.objectives.itl_s == float("inf")
    assert not fleet.speculates and not fleet.narrow_kv


def test_the_speeds_are_those_of_the_steps_and_traces() -> None:
    fleet = measured_fleet(sample(*PAIR), RECORDS, SETTINGS)
    work = StepWork(100, 0, 0, 0)
    assert fleet.fit.model.step_s(work) == pytest.approx(TRUE.step_s(work), rel=0.01)
    assert fleet.fit.model.host_s(64) == pytest.approx(0.01, rel=0.01)


def test_decode_workers_alone_are_colocated() -> None:
    both = steps(prompts=True, decodes=True) + steps(prompts=False, decodes=True)
    alone = worker("d0", "decode", recent_steps=both, verifying_steps=3, narrow_kv=True)
    fleet = measured_fleet(sample(alone), RECORDS, SETTINGS)
    assert (fleet.layout.colocated, fleet.layout.local_chunk_tokens) == (1, 128)
    assert fleet.speculates and fleet.narrow_kv


def test_placement_is_that_of_the_settings() -> None:
    assert measured_fleet(sample(*PAIR), RECORDS, SETTINGS).placement == "auto"
    settings = replace(SETTINGS, router=RouterConfig(placement="disaggregated"))
    assert measured_fleet(sample(*PAIR), RECORDS, settings).placement == "disaggregated"


def test_long_prompts_are_simulated_in_larger_blocks() -> None:
    long = [record(float(n), prompt_tokens=3000) for n in range(30)]
    assert measured_fleet(sample(*PAIR), long, SETTINGS).layout.block_tokens == 128


def test_only_the_last_minutes_count() -> None:
    old = [record(float(n)) for n in range(50)]
    new = [record(2 * WINDOW_S + n / 10) for n in range(MAX_REQUESTS + 7)]
    found = recent(traced_requests([*old, *new]))
    assert len(found) == MAX_REQUESTS and found[0].begun_wall_s > 2 * WINDOW_S


@pytest.mark.parametrize(
    ("workers", "records", "message"),
    [
        (PAIR, RECORDS[:5], "5 requests finished"),
        (PAIR, [], "0 requests finished"),
        (PAIR[:1], RECORDS, "no decode worker answers"),
        ((PAIR[0], replace(PAIR[1], step_limits=None)), RECORDS, "d0 does not report its steps"),
        ((PAIR[0], replace(PAIR[1], recent_steps=())), RECORDS, "0 of the last steps"),
    ],
    ids=["few", "none", "no worker", "old worker", "no steps"],
)
def test_too_little_is_an_error_that_says_what_lacks(
    workers: tuple[WorkerSample, ...], records: list[JsonObject], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        measured_fleet(sample(*workers), records, SETTINGS)
