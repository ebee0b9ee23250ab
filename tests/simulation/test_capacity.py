"""The capacity simulator: small cases by hand, and what must hold of every run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from baton.planner.latency import weighted_quantiles
from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    HostTiming,
    StepTiming,
    TimingModel,
    TransferTiming,
)
from baton.planner.traces import TraceRequest, read_trace
from baton.runtime.errors import ConfigError
from baton.simulation.capacity.capacity_report import table
from baton.simulation.capacity.capacity_run import run_fleet, simulate
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from baton.simulation.capacity.request_record import RequestRecord
from tests.support.shared_traces import shared_trace

TIMING = TimingModel(
    "by hand",
    kv_bytes_per_token=1000.0,
    chunk=ChunkTiming(0.0, 1e-4),
    step=StepTiming(0.010, 0.001),
    transfer=TransferTiming(0.002, 0.0),
    host=HostTiming(0.001, 0.0),
)
BUSY = TimingModel(
    "busy",
    kv_bytes_per_token=1e5,
    chunk=ChunkTiming(0.004, 5e-5),
    step=StepTiming(0.008, 1e-4),
    attention=AttentionTiming(1e-9, 2e-8),
    transfer=TransferTiming(0.0005, 2e-11),
    host=HostTiming(0.001, 1e-7),
)


def drawn_trace(seed: int, count: int = 120, rate: float = 6.0) -> list[TraceRequest]:
    """Requests of which many share the leading blocks of their prompts."""
    rng, now_s, trace = random.Random(seed), 0.0, []
    for _ in range(count):
        prompt = rng.choice((1, 40, 511, 512, 513, 1024, rng.randint(1, 9000)))
        full, shared = -(-prompt // 512), rng.randint(0, 6)
        names = tuple(
            rng.randint(0, 1) if index == 0 and shared else 1000 * min(shared, 3) + index
            for index in range(full)
        )
        blocks = names if rng.random() < 0.7 else ()
        output = rng.choice((1, 2, rng.randint(1, 700)))
        trace.append(TraceRequest(now_s, prompt, output, blocks))
        now_s += rng.expovariate(rate)
    return trace


def records(
    layout: Layout,
    trace: Sequence[TraceRequest],
    timing: TimingModel = TIMING,
    *,
    every_token: bool = False,
) -> list[RequestRecord]:
    return run_fleet(CapacityScenario(layout, every_token=every_token), timing, [*trace]).records


def test_one_request_takes_the_time_of_its_parts() -> None:
    (record,) = records(Layout(prefill=1, decode=1), [TraceRequest(0.0, 1000, 3)])
    prefill_s = 0.001 + 1000e-4
    assert record.ttft_s == pytest.approx(prefill_s)
    # one offer of a full block and one of the partial one, then two steps of one sequence
    assert record.end_s == pytest.approx(prefill_s + 2 * 0.002 + 2 * 0.011)
    assert (record.tokens, record.cached_tokens) == (3, 0)


def test_one_request_on_a_colocated_worker_moves_nothing() -> None:
    layout = Layout(colocated=1, local_chunk_tokens=512)
    (record,) = records(layout, [TraceRequest(0.0, 1000, 3)])
    assert record.ttft_s == pytest.approx(0.001 + 512e-4 + 488e-4)
    assert record.end_s == pytest.approx(record.first_s + 2 * 0.011)


@pytest.mark.parametrize("chunk", [512, 128])
def test_a_prompt_delays_the_tokens_of_a_colocated_worker(chunk: int) -> None:
    """By one chunk, also where that is less than a block of the trace."""
    layout = Layout(colocated=1, local_chunk_tokens=chunk)
    first, second = records(layout, [TraceRequest(0.0, 1, 100), TraceRequest(0.5, 512, 1)])
    assert first.longest_gap_s == pytest.approx(0.011 + chunk * 1e-4)
    assert second.tokens == 1 and second.end_s == second.first_s


def test_a_shared_prefix_is_computed_once() -> None:
    trace = [TraceRequest(0.0, 1024, 2, (7, 8)), TraceRequest(5.0, 1536, 2, (7, 8, 9))]
    for layout in (Layout(prefill=1, decode=1), Layout(colocated=1, local_chunk_tokens=8192)):
        first, second = records(layout, trace)
        assert (first.cached_tokens, second.cached_tokens) == (0, 1024)
        assert second.ttft_s == pytest.approx(0.001 + 512e-4)


def test_a_request_beyond_every_pool_is_refused() -> None:
    layout = Layout(prefill=1, decode=1, pool_tokens=2048)
    small, large = records(layout, [TraceRequest(0.0, 100, 5), TraceRequest(0.1, 3000, 5)])
    assert (small.refused, small.tokens) == (None, 5)
    assert (large.refused, large.tokens) == ("InvalidRequest", 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "layout",
    [
        Layout(prefill=2, decode=2),
        Layout(prefill=1, decode=1, pool_tokens=30 * 512),  # preemptions and revoked grants
        Layout(colocated=2),
        Layout(colocated=1, pool_tokens=24 * 512, local_chunk_tokens=2048),
    ],
    ids=["disaggregated", "small pools", "colocated", "small colocated"],
)
def test_each_request_ends_once_with_all_its_tokens(layout: Layout, seed: int) -> None:
    trace = drawn_trace(seed)
    fleet = run_fleet(
        CapacityScenario(layout), BUSY, trace
    )  # raises if one waits or a block is held
    for stage in fleet.stages():
        assert stage.most_held <= stage.pool.total
        assert stage.busy_s <= max(record.end_s for record in fleet.records) + 1e-6
    for record in fleet.records:
        if record.refused is not None:
            assert record.tokens == 0
            continue
        assert record.tokens == record.request.output_tokens
        assert record.request.arrived_s < record.first_s <= record.last_s == record.end_s
    counted = sum(fleet.gaps.counts)
    assert counted == sum(max(0, record.tokens - 1) for record in fleet.records)
    assert min(fleet.gaps.seconds) > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", [Layout(prefill=2, decode=2), Layout(colocated=2)])
def test_runs_of_steps_equal_single_steps(layout: Layout, seed: int) -> None:
    trace = drawn_trace(seed, count=60)
    together = records(layout, trace, BUSY)
    single = records(layout, trace, BUSY, every_token=True)
    for one, other in zip(together, single, strict=True):
        assert (one.tokens, one.refused) == (other.tokens, other.refused)
        assert one.cached_tokens == other.cached_tokens
        assert one.first_s == pytest.approx(other.first_s, rel=1e-9)
        assert one.end_s == pytest.approx(other.end_s, rel=1e-9)


def test_preempted_sequences_finish() -> None:
    layout = Layout(colocated=1, pool_tokens=8 * 512, local_chunk_tokens=2048)
    trace = [TraceRequest(0.01 * n, 600, 1400) for n in range(6)]
    fleet = run_fleet(CapacityScenario(layout), BUSY, trace)
    assert sum(stage.scheduler.preemptions for stage in fleet.decode.values()) > 0
    assert [record.tokens for record in fleet.records] == [1400] * 6
    # what a preempted sequence finds again is its own: no two prompts share a block
    assert [record.cached_tokens for record in fleet.records] == [0] * 6


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
def test_more_workers_are_not_worse(seed: int) -> None:
    trace = drawn_trace(seed, count=300, rate=8.0)
    for layouts in (
        [Layout(prefill=n, decode=n) for n in (1, 2, 4)],
        [Layout(colocated=n) for n in (1, 2, 4)],
    ):
        means = []
        for layout in layouts:
            found = records(layout, trace, BUSY)
            means.append(sum(r.end_s - r.request.arrived_s for r in found) / len(found))
        assert means[1] <= means[0] * 1.02 and means[2] <= means[1] * 1.02


def test_the_same_trace_gives_the_same_run() -> None:
    trace = drawn_trace(9)
    first, second = (records(Layout(prefill=2, decode=3), trace, BUSY) for _ in range(2))
    assert [record.end_s for record in first] == [record.end_s for record in second]


def test_report_counts_what_meets_the_objectives() -> None:
    scenario = CapacityScenario(
        Layout(prefill=1, decode=1, gpus_per_worker=4), Objectives(0.15, 0.0105), 3.6
    )
    trace = [TraceRequest(0.0, 1000, 3), TraceRequest(10.0, 2000, 3), TraceRequest(20.0, 10, 1)]
    report = simulate(scenario, TIMING, trace)
    assert (report.requests, report.finished, report.output_tokens) == (3, 3, 7)
    assert report.good_share == pytest.approx(1 / 3)  # the last one: the others' gaps are longer
    assert report.cost_per_million == pytest.approx(3.6 * 8 * report.seconds / 3600 / 7 * 1e6)
    assert report.roles["prefill"].busy == pytest.approx(0.301 / report.seconds, rel=0.01)
    text = table(report)
    assert "1048576 tokens of KV a worker" in text
    assert "1 prefill, 1 decode (8 GPUs)" in text and "3 of 3 finished" in text


@pytest.mark.parametrize(("itl_s", "local"), [(math.inf, True), (0.02, False)])
def test_placement_knows_the_objective_of_streams(itl_s: float, local: bool) -> None:
    """Six prompts at once before one prefill worker, beside two streams whose steps take 12 ms."""
    streams = [TraceRequest(0.0, 10, 600) for _ in range(2)]
    burst = [TraceRequest(1.0, 4000, 2) for _ in range(6)]
    scenario = CapacityScenario(Layout(prefill=1, decode=1), Objectives(itl_s=itl_s))
    fleet = run_fleet(scenario, TIMING, [*streams, *burst])
    (decode,) = fleet.decode.values()
    assert (decode.prompt_tokens >= 4000) == local


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    simulate(
        CapacityScenario(Layout(colocated=1)),
        BUSY,
        drawn_trace(1),
        lambda done, of: seen.append((done, of)),
    )
    assert seen[-1] == (120, 120)


def test_weighted_quantiles_equal_those_of_repeated_values() -> None:
    rng = np.random.default_rng(3)
    values, counts = rng.random(50), rng.integers(1, 9, 50)
    repeated = np.sort(np.repeat(values, counts))
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        index = int(np.ceil(share * len(repeated))) - 1
        assert weighted_quantiles(values, counts, [share]) == [repeated[index]]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"prefill": 2}, "2 prefill and 0 decode workers"),
        ({}, "0 prefill and 0 decode workers"),
        ({"colocated": 1, "decode": 1}, "give --colocated alone"),
        ({"colocated": 10_001}, "10001 workers"),
        ({"colocated": 1, "pool_tokens": 100}, "a pool of 100 tokens has no block"),
    ],
)
def test_impossible_layouts_are_refused(layout: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(**layout)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_each_request_of_the_conversation_trace_ends() -> None:
    trace = read_trace(shared_trace("mooncake/conversation_trace.jsonl"))
    report = simulate(CapacityScenario(Layout(prefill=3, decode=5)), BUSY, trace)
    assert report.finished == len(trace) == 12_031
    assert report.output_tokens == sum(each.output_tokens for each in trace)
