"""The prefill scheduler: blocks for all of a prompt or none, offers in order, pins to the end."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.draw_costs import DrawCosts
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import StepPlan
from baton.runtime.errors import EngineError, InvalidRequest, OutOfMemory, Overloaded
from tests.support.grammar_scene import failed_masks
from tests.support.prefill_bench import PrefillBench, events


def test_offers_follow_the_chunks_and_end_with_the_partial_block() -> None:
    bench = PrefillBench()
    prompt = bench.submit(list(range(22)), choices=2)
    bench.run()
    expected = ["offer 0+2", "offer 2+2", "offer 4+1", "first 2 cached 0", "offer 5+1 partial 2"]
    assert events(prompt) == [*expected, "None"]
    assert bench.pool.counts().pinned == 6 and bench.pool.counts().used == 0
    prompt.end()
    counts = bench.pool.counts()
    assert (counts.pinned, counts.cached, counts.free) == (0, 5, 27)
    bench.pool.check()


def test_a_cached_prefix_is_offered_at_admission() -> None:
    bench = PrefillBench()
    first = bench.submit(list(range(20)))
    bench.run()
    first.end()
    second = bench.submit(list(range(20)))
    bench.scheduler.admit()
    assert events(second) == ["offer 0+4"]  # before any step
    assert bench.step() == 4
    assert events(second) == ["offer 4+1", "first 1 cached 16", "None"]


def test_blocks_held_by_the_reader_are_computed_but_not_offered() -> None:
    bench = PrefillBench()
    prompt = bench.submit(list(range(20)), held=3)
    bench.run()
    assert events(prompt) == ["offer 3+1", "offer 4+1", "first 1 cached 0", "None"]
    assert bench.pool.counts().pinned == 2


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    bench = PrefillBench(blocks=8)
    first = bench.submit([1] * 20)
    second = bench.submit([2] * 20)
    bench.run()
    assert bench.scheduler.waiting == 1 and events(second) == []
    first.end()
    bench.run()
    assert events(second)[-1] == "None"


def test_a_prompt_that_never_fits_and_a_full_queue_are_refused() -> None:
    bench = PrefillBench(blocks=4, max_queue=1)
    with pytest.raises(InvalidRequest, match="needs 5 KV blocks and the prefill pool has 4"):
        bench.submit([1] * 17)
    bench.submit([1] * 16)
    with pytest.raises(Overloaded):
        bench.submit([2] * 4)


@pytest.mark.parametrize("reason", ["fuel", ""])
def test_masks_that_failed_fail_the_prompt(reason: str) -> None:
    """Without a reason too: the draw had no mask, so its token may be none of the grammar."""
    bench = PrefillBench()
    prompt = bench.submit([1] * 6)
    prompt.masks = failed_masks(reason)
    bench.run()
    (failure,) = events(prompt)
    assert failure.startswith("InvalidRequest('the grammar took too many states")
    assert bench.pool.available == bench.pool.total


def test_the_end_frees_a_waiting_prompt_and_one_in_progress() -> None:
    bench = PrefillBench(blocks=8)
    running = bench.submit([1] * 24)
    waiting = bench.submit([2] * 24)
    bench.step()
    waiting.end()
    running.end()
    assert bench.scheduler.waiting == 0 and bench.scheduler.queued_tokens == 0
    assert bench.pool.available == 8


def test_the_end_during_a_step_frees_with_the_step() -> None:
    bench = PrefillBench()
    prompt = bench.submit([1] * 8)
    bench.scheduler.admit()
    plan = bench.scheduler.plan()
    prompt.end()
    assert bench.pool.counts().used == 2  # the device still writes there
    bench.scheduler.commit(plan, StepResult(((Drawn(0, 1),),)))
    assert bench.pool.available == bench.pool.total
    assert bench.pool.counts().cached == 0  # what was computed is unknown


def test_broken_numbers_fail_the_prompt_and_are_not_cached() -> None:
    bench = PrefillBench()
    prompt = bench.submit([1] * 12)
    bench.step()
    bench.step(broken=frozenset({0}))
    assert any("EngineError" in event for event in events(prompt))
    prompt.end()
    assert bench.pool.counts().free == bench.pool.total


def test_a_prompt_that_was_not_computed_fails_alone() -> None:
    bench = PrefillBench()
    bad, good = bench.submit([1] * 8), bench.submit([2] * 8)
    bench.step(failed={0: EngineError("no luck")})
    bench.run()
    assert any("no luck" in event for event in events(bad))
    assert events(good)[-1] == "None"
    bad.end(), good.end()
    assert bench.pool.available == bench.pool.total


def test_a_chunk_too_large_for_memory_is_cut_before_failing() -> None:
    bench = PrefillBench()
    prompt = bench.submit(list(range(22)))
    short = {0: OutOfMemory("no memory")}
    assert bench.step(failed=short) == 8  # nothing of it counts
    assert bench.scheduler.queued_tokens == 22 and events(prompt) == []
    assert [bench.step(), bench.step()] == [4, 4]
    assert events(prompt) == ["offer 0+1", "offer 1+1"]
    bench.step(failed=short)  # one block is no less
    assert any("no memory" in event for event in events(prompt))
    prompt.end()
    assert bench.pool.available == bench.pool.total


def draws(plan: StepPlan, **more: Any) -> StepResult:
    drawn = tuple(tuple(Drawn(d.choice, 7) for d in piece.draws) for piece in plan.batch.slices)
    return StepResult(drawn, **more)


def two_steps(bench: PrefillBench) -> tuple[Prompt, StepPlan, StepPlan]:
    """A prompt with its first two chunks of eight tokens under way."""
    prompt = bench.submit(list(range(18)))
    bench.scheduler.admit()
    first, second = bench.scheduler.plan(), bench.scheduler.plan()
    assert [list(p.batch.slices[0].tokens) for p in (first, second)] == [
        list(range(8)),
        list(range(8, 16)),
    ]
    return prompt, first, second


def test_the_next_chunk_is_planned_during_one_and_offered_after() -> None:
    bench = PrefillBench()
    prompt, first, second = two_steps(bench)
    assert events(prompt) == []
    bench.scheduler.commit(first, draws(first))
    assert events(prompt) == ["offer 0+2"]
    third = bench.scheduler.plan()
    bench.scheduler.commit(second, draws(second))
    assert events(prompt) == ["offer 2+2"]
    assert not bench.scheduler.plan()  # its last tokens are under way
    (last,) = bench.scheduler.commit(third, draws(third))
    assert last.key is prompt and last.last
    assert events(prompt) == ["first 1 cached 0", "offer 4+1 partial 2", "None"]
    prompt.end()
    assert bench.pool.available == bench.pool.total


@pytest.mark.parametrize("how", ["ended", "broken", "failed", "step failed"])
def test_blocks_of_an_ended_prompt_are_freed_with_the_last_step(
    how: str,
) -> None:
    bench = PrefillBench()
    prompt, first, second = two_steps(bench)
    if how == "step failed":
        bench.scheduler.abandon_step(first, EngineError("device"))
    elif how == "ended":
        prompt.end()
        bench.scheduler.commit(first, draws(first))
    elif how == "broken":
        bench.scheduler.commit(first, draws(first, broken=frozenset({0})))
    else:
        bench.scheduler.commit(first, draws(first, failed={0: EngineError("no luck")}))
    assert bench.pool.counts().used == 5
    assert not bench.scheduler.plan() and bench.scheduler.queued_tokens == 0
    bench.scheduler.commit(second, draws(second))
    counts = bench.pool.counts()
    assert (counts.used, counts.cached) == (0, 0)  # nothing of the second is published either
    assert all("Error" in event for event in events(prompt))
    if how != "ended":
        prompt.end()
    bench.pool.check()


def test_after_a_cut_chunk_the_one_under_way_is_computed_again() -> None:
    bench = PrefillBench()
    prompt, first, second = two_steps(bench)
    short = draws(first, failed={0: OutOfMemory("no memory")})
    assert bench.scheduler.commit(first, short) == []
    again = bench.scheduler.plan()
    assert list(again.batch.slices[0].tokens) == [0, 1, 2, 3]
    garbage = draws(second, broken=frozenset({0}))  # that is what it read
    assert bench.scheduler.commit(second, garbage) == []
    assert events(prompt) == []
    assert bench.scheduler.commit(again, draws(again)) == again.chunks
    bench.run()
    assert events(prompt)[:2] == ["offer 0+1", "offer 1+1"]
    prompt.end()
    assert bench.pool.counts().cached == 4
    bench.pool.check()


def test_a_failed_step_fails_its_prompts_alone() -> None:
    bench = PrefillBench(max_prompts=1)
    first, second = bench.submit([1] * 8), bench.submit([2] * 8)
    bench.scheduler.admit()
    bench.scheduler.abandon_step(bench.scheduler.plan(), EngineError("device"))
    first.end()
    bench.run()
    assert events(second)[-1] == "None"


def test_fresh_blocks_are_announced_before_they_get_new_content() -> None:
    bench = PrefillBench(blocks=4)
    first = bench.submit([1] * 16)
    bench.run()
    first.end()
    seen = list(bench.fresh)
    second = bench.submit([2] * 8)
    bench.run()
    assert len(seen) == 4 and set(bench.fresh[4:]) == set(second.pinned)


async def test_a_stop_fails_unfinished_prompts_and_no_complete_one() -> None:
    bench = PrefillBench(max_prompts=1)
    complete = bench.submit([1] * 6)
    bench.run()
    computed, waiting = bench.submit([2] * 30), bench.submit([3] * 5)
    bench.step()
    bench.scheduler.stop(EngineError("over"))
    for prompt in (computed, waiting):
        while not isinstance(event := prompt.events.get_nowait(), EngineError):
            assert event is not None
        assert prompt.events.empty()
    while complete.events.get_nowait() is not None:
        pass
    assert complete.events.empty()
    for prompt in (complete, computed, waiting):
        prompt.end()
    bench.pool.check()
    assert bench.pool.available == bench.pool.total


@pytest.mark.parametrize(("choices", "computed"), [(1, 2), (3, 1)])
def test_first_tokens_of_all_choices_take_their_share(choices: int, computed: int) -> None:
    bench = PrefillBench(costs=DrawCosts(greedy_s=1.0))
    bench.submit([1] * 4)
    bench.submit([2] * 4, choices=choices)
    bench.scheduler.admit()
    plan = bench.scheduler.plan(tokens_per_s=4.0)  # 16 tokens, four of which a draw takes
    assert len(plan.chunks) == computed


def test_private_blocks_are_offered_and_not_cached() -> None:
    bench = PrefillBench()
    prompt = bench.submit(list(range(20)), private=True)
    bench.run()
    assert [event[:5] for event in events(prompt)[:2]] == ["offer", "offer"]
    prompt.end()
    assert bench.pool.counts().free == bench.pool.total
