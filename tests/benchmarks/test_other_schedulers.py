"""The schedulers of DistServe and vLLM 0.2, by examples that can be followed by hand."""

from __future__ import annotations

import pytest

from baton.planner.timing_model import (
    ChunkTiming,
    HostTiming,
    StepTiming,
    TimingModel,
    TransferTiming,
)
from baton.planner.traces import TraceRequest
from benchmarks.simulator.other_schedulers import POLL_S, Replayed, replay

# A prompt takes a second for a hundred tokens, a decode step one second, a copy half of one.
TIMING = TimingModel(
    "by hand", 1.0, ChunkTiming(0.0, 0.01), StepTiming(1.0), transfer=TransferTiming(0.5)
)


def times(done: list[Replayed]) -> list[tuple[float, float]]:
    return [(round(each.first_s, 2), round(each.end_s, 2)) for each in done]


def distserve(*traffic: TraceRequest, decode: int = 1000, context: int = 1000) -> list[Replayed]:
    return replay(traffic, TIMING, decode, context)[0]


def vllm(*traffic: TraceRequest, blocks: int = 1000) -> list[Replayed]:
    return replay(traffic, TIMING, blocks)[0]


def test_distserve_copies_a_prompt_and_then_decodes_it() -> None:
    (done,) = distserve(TraceRequest(0.0, 200, 3))
    assert done.first_s == pytest.approx(2.0)
    assert done.end_s == pytest.approx(2.0 + POLL_S / 2 + 0.5 + 2 * 1.0)


def test_distserve_computes_whole_prompts_that_wait_together() -> None:
    done = distserve(*(TraceRequest(at, 100, 1) for at in (0.0, 0.1, 0.2)))
    assert [first for first, _ in times(done)] == [1.0, 3.0, 3.0]


def test_distserve_copies_between_two_decode_steps() -> None:
    first, second = distserve(TraceRequest(0.0, 100, 6), TraceRequest(0.5, 100, 2))
    # steps of the first end at 2.5, then the second is copied for half a second, then both decode
    assert times([second]) == [(2.0, 4.0)]
    assert times([first]) == [(1.0, 7.0)]


def test_distserve_waits_for_decode_room_after_a_token() -> None:
    traffic = TraceRequest(0.0, 160, 4), TraceRequest(0.0, 160, 2)
    free, full = distserve(*traffic), distserve(*traffic, decode=22)
    assert times(free) == [(1.6, 5.6), (3.2, 5.6)]
    assert times(full) == [(1.6, 5.6), (3.2, 6.6)]


def test_distserve_prompts_wait_for_the_context_pool() -> None:
    traffic = TraceRequest(0.0, 160, 9), TraceRequest(0.0, 160, 2)
    full = distserve(*traffic, context=10)
    # the second prompt begins once the first one's KV is copied
    assert [first for first, _ in times(full)] == [1.6, 3.7]


def test_distserve_swaps_the_youngest_and_it_goes_on_later() -> None:
    done = distserve(TraceRequest(0.0, 32, 40), TraceRequest(0.0, 32, 40), decode=9)
    assert done[0].end_s < done[1].end_s
    assert all(each.made == 40 for each in done)


def test_vllm_computes_prompts_before_it_decodes() -> None:
    first, second = vllm(TraceRequest(0.0, 100, 3), TraceRequest(1.5, 100, 1))
    # the step of 1 to 2 ends, then the prompt is computed, then the first decodes again
    assert times([first, second]) == [(1.0, 4.0), (3.0, 3.0)]


def test_vllm_recomputes_the_youngest_when_blocks_run_out() -> None:
    done = vllm(TraceRequest(0.0, 32, 40), TraceRequest(0.0, 32, 40), blocks=7)
    assert done[0].end_s < done[1].end_s
    # its prompt of then 32 + n tokens was computed again
    assert done[1].end_s - done[0].end_s > 0.32


def test_own_time_passes_before_a_prompt_is_queued() -> None:
    later = TimingModel("by hand", 1.0, ChunkTiming(0.0, 0.01), StepTiming(1.0), host=HostTiming(2))
    (done,) = replay([TraceRequest(0.0, 100, 1)], later, 1000)[0]
    assert done.ttft_s == pytest.approx(3.0)


@pytest.mark.parametrize("context", [0, 1000])
def test_a_request_larger_than_the_pool_is_an_error(context: int) -> None:
    with pytest.raises(RuntimeError, match="1 of 1 requests never end"):
        replay([TraceRequest(0.0, 160, 2)], TIMING, 5, context)


def test_the_largest_share_of_a_pool_is_reported() -> None:
    assert replay([TraceRequest(0.0, 160, 3)], TIMING, 22)[1] == pytest.approx(0.5)
