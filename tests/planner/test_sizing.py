"""Workers of each role for a load, by a timing model that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.planner.gpu_table import GPUS, find_gpu
from baton.planner.sizing import (
    MAX_BATCH_SHARE,
    MAX_PREFILL_BUSY,
    DecodeLimits,
    Load,
    PrefillSize,
    size_decode,
    size_prefill,
)
from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    HostTiming,
    StepTiming,
    TimingModel,
    TransferTiming,
)
from baton.runtime.errors import ConfigError

# A prompt of 1,000 tokens takes 0.1 s; a step of b sequences 10 ms + b ms.
TIMING = TimingModel("by hand", 1000.0, ChunkTiming(0.0, 1e-4), StepTiming(0.01, 0.001))
LOAD = Load(requests_per_s=30.0, prompt_tokens=1000, output_tokens=100)
AT_ONCE = PrefillSize(1, 0.0, 1.0, 0.0, ttft_s=0.0, unmet=False)


def test_prefill_workers_stay_below_their_share_of_the_time() -> None:
    found = size_prefill(LOAD, TIMING, 8192)
    assert (found.workers, found.unmet) == (4, False)  # 3 would be busy all the time
    assert found.busy == pytest.approx(0.75) and found.busy <= MAX_PREFILL_BUSY + 1e-9
    assert found.prompt_s == pytest.approx(0.1) and found.tokens_per_s == pytest.approx(10_000)
    assert found.ttft_s == pytest.approx(0.1 + 0.75 * 0.1 / (2 * 0.25))


def test_one_more_worker_meets_a_shorter_first_token() -> None:
    loose = size_prefill(LOAD, TIMING, 8192)
    found = size_prefill(replace(LOAD, ttft_s=0.15), TIMING, 8192)
    assert found.workers > loose.workers and found.ttft_s <= 0.15
    fewer = LOAD.requests_per_s * 0.1 / (found.workers - 1)
    assert 0.1 + fewer * 0.1 / (2 * (1 - fewer)) > 0.15  # the smallest number that does


def test_first_token_below_the_prompts_own_time_is_unmet() -> None:
    found = size_prefill(replace(LOAD, ttft_s=0.1), TIMING, 8192)
    assert found.unmet and found.workers == 4


def test_chunks_transfer_and_host_count() -> None:
    timing = replace(
        TIMING,
        chunk=ChunkTiming(0.01, 1e-4),
        attention=AttentionTiming(per_pair_s=1e-8),
        transfer=TransferTiming(0.002, 1e-9),
        host=HostTiming(0.001),
    )
    found = size_prefill(replace(LOAD, requests_per_s=1e-9), timing, 300)  # 4 chunks
    assert found.prompt_s == pytest.approx(4 * 0.01 + 0.1 + 1e-8 * 1000 * 1001 / 2)
    last = 0.002 + 1e-9 * 100 * 1000
    assert found.ttft_s == pytest.approx(found.prompt_s + last + 0.001)


def test_decode_workers_settle_at_the_batch_of_the_load() -> None:
    found = size_decode(LOAD, TIMING, DecodeLimits(batch=60, pool=1000), AT_ONCE)
    # A batch of 54 (0.9 of 60) takes 64 ms: 843.75 tokens a second; 3,000 are needed.
    assert found.workers == 4 and found.tokens_per_s == pytest.approx(54 / 0.064)
    assert found.sequences == 30 and found.step_s == pytest.approx(0.04)  # 30 / 0.04 = 750


def test_a_token_gap_bounds_the_batch() -> None:
    limits = DecodeLimits(batch=60, pool=1000)
    found = size_decode(replace(LOAD, itl_s=0.03), TIMING, limits, AT_ONCE)
    assert found.step_s <= 0.03 + 1e-12 and found.tokens_per_s == pytest.approx(20 / 0.03)
    assert found.workers == 5 and not found.unmet
    assert size_decode(replace(LOAD, itl_s=0.0105), TIMING, limits, AT_ONCE).unmet


def test_the_pool_holds_prompts_that_are_being_prefilled() -> None:
    limits = DecodeLimits(batch=60, pool=60)
    without = size_decode(LOAD, TIMING, limits, AT_ONCE)
    slow = replace(AT_ONCE, ttft_s=5.0)
    found = size_decode(LOAD, TIMING, limits, slow)
    assert found.workers > without.workers
    assert found.sequences + found.reserved <= MAX_BATCH_SHARE * 60
    assert found.reserved == pytest.approx(LOAD.requests_per_s / found.workers * 5.0)


def test_a_pool_of_one_sequence_still_serves() -> None:
    found = size_decode(LOAD, TIMING, DecodeLimits(batch=256, pool=1), AT_ONCE)
    assert found.sequences == 1 and found.workers == 33  # 100 tokens, each of 11 ms, at 30 a second


def test_more_load_never_needs_fewer_workers() -> None:
    counts = [
        (
            size_prefill(replace(LOAD, requests_per_s=rate), TIMING, 512).workers,
            size_decode(
                replace(LOAD, requests_per_s=rate), TIMING, DecodeLimits(64, 100), AT_ONCE
            ).workers,
        )
        for rate in (0.1, 1.0, 5.0, 20.0, 50.0, 200.0)
    ]
    assert counts == sorted(counts) and counts[0] == (1, 1)


def test_gpus_are_found_in_any_case_and_named() -> None:
    assert find_gpu("H200") is GPUS["h200"]
    with pytest.raises(ConfigError, match="'h300' is not known: did you mean h200"):
        find_gpu("h300")
    for gpu in GPUS.values():  # no slip of a power of ten
        assert 20 < gpu.memory_gib < 300
        assert 0.2e12 < gpu.memory_bytes_per_s < 10e12 and 50e12 < gpu.flops_per_s < 5e15
