"""What a placement compares of a worker is the sum of the parts that explain it, and what a long
prompt costs the streams of a decode worker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.planner.live_timing import PRIOR
from baton.router.fleet.placement_costs import DecodeCosts, PrefillCosts, RemotePrefill
from baton.router.fleet.request_need import Source
from baton.router.fleet.worker_costs import PRIOR_COSTS, WorkerCosts
from baton.router.fleet.worker_view import KvFormat
from tests.support.placement_scene import NEED, SHAPE, Seen, place, view

NO_SPEEDS: dict[bytes, float] = {}
STRICT = WorkerCosts(PRIOR, itl_s=0.007)
APART = WorkerCosts(PRIOR, byte_s=(1e-11, 5e-11, 2e-10, 2e-8, 1e-6))
WORKERS = st.builds(
    lambda **fields: view("worker-0", **fields),
    running=st.integers(0, 9),
    waiting=st.integers(0, 3),
    free_blocks=st.sampled_from([0, 60, 1000]),
    queued_tokens=st.sampled_from([0, 300, 40_000]),
    placed_tokens=st.sampled_from([0, 500]),
    costs=st.sampled_from([PRIOR_COSTS, STRICT, APART]),
    kv_format=st.sampled_from([SHAPE, KvFormat("f", "bfloat16", 16)]),
    topology=st.sampled_from(["", "a/r1/h1", "a/r2/h2"]),
    degraded=st.sampled_from([NO_SPEEDS, {b"source-0": 0.02}]),
)
DEFERRED = st.sampled_from([frozenset[bytes](), frozenset({b"worker-0"})])
UNCACHED = st.integers(1, NEED.tokens)


@given(
    worker=WORKERS,
    uncached=UNCACHED,
    deferred=DEFERRED,
    there=st.sampled_from([None, RemotePrefill(PRIOR_COSTS, 20_000, 50_000, 40_000)]),
    auto=st.booleans(),
)
def test_price_is_sum_of_parts_on_decode_workers(
    worker: Seen,
    uncached: int,
    deferred: frozenset[bytes],
    there: RemotePrefill | None,
    auto: bool,
) -> None:
    costs = DecodeCosts.of(NEED, worker.costs, uncached, there, auto=auto, deferred=deferred)
    parts = costs.parts(worker)
    assert costs.price_us(worker) == sum(parts)
    assert parts.prefill_us >= costs.least_us(worker.running)


@given(
    worker=WORKERS,
    uncached=UNCACHED,
    deferred=DEFERRED,
    source=st.sampled_from([None, Source(view("source-0", topology="a/r1/h3"), 40)]),
    slow=st.sampled_from([NO_SPEEDS, {b"worker-0": 0.02}]),
    topology=st.sampled_from(["", "a/r1/h1"]),
)
def test_price_is_sum_of_parts_on_prefill_workers(
    worker: Seen,
    uncached: int,
    deferred: frozenset[bytes],
    source: Source | None,
    slow: dict[bytes, float],
    topology: str,
) -> None:
    costs = PrefillCosts(NEED, deferred, SHAPE, source, slow, topology)
    parts = costs.parts(worker, uncached)
    alike = costs.alike(worker.costs, worker.kv_format[1], uncached)
    assert alike.price_us(worker) == sum(parts)
    assert alike.least_us <= sum(parts) - parts.queue_us


@pytest.mark.parametrize(
    ("streams", "local"),
    [
        ({}, True),
        ({"running": 1}, False),
        ({"active_requests": 1}, False),
        ({"placed_requests": 1}, False),
        ({"waiting": 1, "queued_tokens": 40_000}, False),
    ],
)
def test_long_prompt_goes_to_idle_decode_worker(streams: dict[str, int], local: bool) -> None:
    """Three seconds there, or 24 behind the prompts of the prefill worker."""
    long_need = replace(NEED, tokens=40_000, most_tokens=40_100)
    pool = {"free_blocks": 10_000, "total_blocks": 10_000}
    decode = view("decode-0", **pool, **streams)
    prefill = view("prefill-0", **pool, queued_tokens=400_000, running=8)
    assert place(long_need, [decode, prefill], "auto").local == local


def test_slow_start_makes_no_prefill_local() -> None:
    """It chooses among prefill workers: a lone new one is as far away as before."""
    worker, plain = view("prefill-0"), PrefillCosts(NEED, frozenset(), SHAPE)
    deferred = PrefillCosts(NEED, frozenset({worker.boot_id}), SHAPE)
    assert deferred.parts(worker, 500).slow_start_us > 0
    assert deferred.remote(worker, 500) == plain.remote(worker, 500)
