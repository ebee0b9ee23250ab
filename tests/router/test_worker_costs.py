"""What work costs, in microseconds: the timing model's seconds, and what placement adds to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    StepTiming,
    TimingModel,
    TransferTiming,
)
from baton.router.fleet.worker_costs import HIDDEN_SHARE, Pair, WorkerCosts
from baton.runtime.worker.attention_pairs import causal_pairs

TIMING = TimingModel(
    "test",
    1000.0,
    ChunkTiming(0.010, 1e-4),
    StepTiming(0.008, 1e-3),
    AttentionTiming(1e-8, 1e-6),
    TransferTiming(0.005, 1e-9),
)
COSTS = WorkerCosts(TIMING, 1.0, step_tokens=1000, chunk_tokens=500, growth_tokens=100)


def test_a_prompt_is_computed_in_chunks_after_what_is_cached() -> None:
    pairs = causal_pairs(200, 1400)
    assert COSTS.compute_us(200, 1400) == round(3 * 10_000 + 1200 * 100 + pairs * 0.01)
    assert COSTS.queue_us(1200, pairs) == round(2 * 10_000 + 1200 * 100 + pairs * 0.01)
    assert COSTS.queue_us(0, 0) == 0
    slow = WorkerCosts(TIMING, 2.0, step_tokens=1000, chunk_tokens=500)
    assert slow.compute_us(200, 1400) == 2 * COSTS.compute_us(200, 1400)


def test_a_stream_is_delayed_by_what_a_step_takes_longer() -> None:
    assert COSTS.delay_us(0, 500) == 2_000 + 50_000 + round(causal_pairs(0, 500) * 0.01)
    quick = replace(TIMING, chunk=ChunkTiming(0.001, 1e-4))
    found = WorkerCosts(quick, chunk_tokens=500).delay_us(0, 500)
    assert found == 50_000 + round(causal_pairs(0, 500) * 0.01)


@pytest.mark.parametrize(
    ("delay_us", "longest_us", "sequences", "found"),
    [
        (45_000, 9_000, 2, 0),  # steps of 20 ms: none takes longer than the objective
        (45_000, 9_001, 2, 100_000),  # 45 ms of the 900 that 100 steps of 11 ms leave of it
        (5_000_000, 30_000, 2, 2_000_000),  # it is missed
        (20_000, 1, 20, 200_000),  # it is missed without the delay: a tenth counts as left
        (0, 0, 20, 0),
    ],
)
def test_a_delay_costs_the_share_of_an_objective_that_it_takes(
    delay_us: int, longest_us: int, sequences: int, found: int
) -> None:
    strict = replace(COSTS, itl_s=0.020)
    assert strict.miss_us(delay_us, longest_us, sequences, 1000) == found
    assert COSTS.miss_us(delay_us, longest_us, sequences, 1000) == 0


def test_a_batch_delays_and_is_delayed_over_the_expected_output() -> None:
    assert COSTS.batch_us(3, 2000) == 2 * 100 * (3 * 1000 + 2000)
    assert COSTS.batch_us(0, 0) == 0


def test_credit_of_a_whole_pool_is_the_life_of_a_sequence() -> None:
    pool = 1 << 16
    step_us = 8_000 + 1_000 * pool / 1024 + pool
    assert COSTS.credit_us(pool) * pool == pytest.approx(100 * step_us, rel=0.01)
    assert COSTS.credit_us(0) >= 1


def test_reads_cost_what_the_computation_does_not_hide() -> None:
    assert COSTS.read_us(4000) == 4000
    assert COSTS.read_us(4000, Pair(gb_per_s=0.1)) == 40_000
    hidden = round(HIDDEN_SHARE * 3500)
    assert COSTS.move_us(4000, 1_000_000) == 500 + hidden  # the last chunk
    assert COSTS.move_us(4000, 1000) == 3000 + round(HIDDEN_SHARE * 1000)
    assert COSTS.move_us(300, 0) == 300
    assert COSTS.move_us(0, 0) == 0
    assert COSTS.handoff_us == 5000


def test_reads_of_a_pair_cost_what_its_distance_takes() -> None:
    apart = WorkerCosts(TIMING, byte_s=(5e-10, 1e-9, 4e-9, 4e-9, 4e-9))
    assert [apart.read_us(4000, Pair(distance=d)) for d in (0, 1, 2)] == [2000, 4000, 16_000]
    assert apart.read_us(4000) == 4000  # of any pair
    assert apart.read_us(4000, Pair(100.0, 2)) == 2000  # no quicker than the nearest
    assert COSTS.read_us(4000, Pair(distance=3)) == 4000  # nothing is known of distances
