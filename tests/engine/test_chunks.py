"""The chunk scheduler: budget, borders, fairness, and an end for every prompt."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from baton.engine.scheduling.chunks import AGEING, Chunk, ChunkScheduler


def commit(scheduler: ChunkScheduler[Any], chunks: list[Chunk[Any]]) -> None:
    for chunk in chunks:
        assert scheduler.follows(chunk)
        scheduler.commit(chunk)


def steps_until_done(scheduler: ChunkScheduler[str], limit: int = 1000) -> dict[str, int]:
    """Run to the end; the step in which each prompt finished."""
    done: dict[str, int] = {}
    for step in range(limit):
        chunks = scheduler.plan()
        if not chunks:
            return done
        commit(scheduler, chunks)
        done.update({chunk.key: step for chunk in chunks if chunk.last})
    raise AssertionError("the prompts never end")


def test_one_prompt_goes_in_chunks_that_end_on_block_borders() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(512, 256, 16)
    scheduler.add("a", 600, 0)
    seen: list[Chunk[str]] = []
    while chunks := scheduler.plan():
        seen += chunks
        commit(scheduler, chunks)
    assert [(c.start, c.end, c.last) for c in seen] == [
        (0, 256, False),
        (256, 512, False),
        (512, 600, True),
    ]


def test_a_cached_prefix_is_not_computed_again() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(512, 256, 16)
    scheduler.add("a", 100, 96)
    assert scheduler.plan() == [Chunk("a", 96, 100, last=True)]


def test_a_short_prompt_passes_a_long_one() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 64, 16)
    scheduler.add("long", 6400, 0)
    scheduler.add("short", 20, 0)
    done = steps_until_done(scheduler)
    assert done["short"] == 0
    assert done["long"] < 110


def test_prompts_of_a_burst_end_one_after_the_other() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(256, 256, 16)
    for key in ("a", "b", "c"):
        scheduler.add(key, 1500, 0)
    done = steps_until_done(scheduler)
    assert done == {"a": 5, "b": 11, "c": 17}  # of 5.86 steps each


def test_a_prompt_that_a_step_ends_leaves_the_rest_to_the_next() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 64, 16)
    scheduler.add("long", 200, 0)
    scheduler.add("short", 20, 0)
    assert scheduler.plan() == [
        Chunk("short", 0, 20, last=True),
        Chunk("long", 0, 32, last=False),
    ]


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 64, 16)
    scheduler.add("long", 320, 0)
    planned_before = 0
    for step in range(1000):
        for n in range(4):  # they alone fill each step
            scheduler.add(f"short-{step}-{n}", 16, 0)
        chunks = scheduler.plan()
        commit(scheduler, chunks)
        if any(chunk.key == "long" for chunk in chunks):
            break
        planned_before += 64
    assert planned_before == pytest.approx((320 - 16) / AGEING, abs=64)
    assert steps_until_done(scheduler)["long"] == 3  # nothing passes it any more


@pytest.mark.parametrize("seed", range(20))
def test_only_prompts_that_come_soon_after_pass_an_older_one(seed: int) -> None:
    """The promise of AGEING: while a prompt of n tokens waits, it is passed only by prompts that
    came before n / AGEING further tokens were planned, whatever arrives."""
    rng = random.Random(seed)
    scheduler: ChunkScheduler[int] = ChunkScheduler(64, 64, 16)
    came_at: dict[int, int] = {}
    left: dict[int, int] = {}
    planned = 0
    for _ in range(400):
        for _ in range(rng.choice([0, 0, 1, 3])):
            key = len(came_at)
            came_at[key], left[key] = planned, rng.choice([1, 16, 40, 200, 1500])
            scheduler.add(key, left[key], 0)
        chunks = scheduler.plan()
        for index, chunk in enumerate(chunks):
            if sum(each.end - each.start for each in chunks[:index]) > 64 - 16:
                break  # what is left is less than a block
            for other in left.keys() - {each.key for each in chunks[:index]}:
                passed = came_at[chunk.key] - came_at[other]
                assert passed < max(1, left[other] / AGEING), (other, chunk)
        for chunk in chunks:
            left[chunk.key] -= chunk.end - chunk.start
            planned += chunk.end - chunk.start
            if chunk.last:
                del left[chunk.key]
        commit(scheduler, chunks)
    assert len(came_at) > 300


def test_a_cancelled_prompt_leaves_the_plan_with_its_chunk() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 64, 16)
    scheduler.add("a", 640, 0)
    (chunk,) = scheduler.plan()
    scheduler.remove("a")
    assert not scheduler.follows(chunk)
    assert len(scheduler) == 0 and scheduler.plan() == []


def test_the_next_chunk_is_planned_while_one_runs() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 64, 16)
    scheduler.add("a", 100, 0)
    first, second = scheduler.plan(), scheduler.plan()
    assert [*first, *second] == [Chunk("a", 0, 64, last=False), Chunk("a", 64, 100, last=True)]
    assert scheduler.plan() == []  # all of it is under way
    assert scheduler.remaining_tokens == 100
    commit(scheduler, first)
    assert scheduler.remaining_tokens == 36
    scheduler.add("b", 20, 0)
    assert scheduler.plan() == [Chunk("b", 0, 20, last=True)]
    commit(scheduler, second)
    assert len(scheduler) == 1


def test_a_prompt_under_way_takes_no_share_of_a_step() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 64, 16)
    scheduler.add("a", 40, 0)
    scheduler.plan()
    scheduler.add("b", 640, 0)
    assert scheduler.plan() == [Chunk("b", 0, 64, last=False)]


def test_a_chunk_too_large_is_halved_and_later_ones_dropped() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 64, 16)
    scheduler.add("a", 200, 0)
    (first,), (second,) = scheduler.plan(), scheduler.plan()
    assert scheduler.cut(first)
    (again,) = scheduler.plan()  # while the second is still under way
    assert (again.start, again.end) == (0, 32)
    assert not scheduler.follows(second)
    assert scheduler.follows(again)
    assert scheduler.cut(again)
    spans = []
    while chunks := scheduler.plan():
        commit(scheduler, chunks)
        spans += [(chunk.start, chunk.end) for chunk in chunks]
    assert spans == [(start, min(start + 16, 200)) for start in range(0, 200, 16)]


def test_a_chunk_of_one_block_is_not_cut() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 16, 16)
    scheduler.add("a", 40, 0)
    (chunk,) = scheduler.plan()
    assert not scheduler.cut(chunk)
    commit(scheduler, [chunk])
    assert scheduler.plan() == [Chunk("a", 16, 32, last=False)]


@pytest.mark.parametrize("seed", range(30))
def test_any_mix_respects_the_budget_and_ends(seed: int) -> None:
    """Also where a step is planned while one or two others are under way, and some are cut."""
    rng = random.Random(seed)
    block = rng.choice([1, 4, 16])
    step = block * rng.randrange(1, 40)
    scheduler: ChunkScheduler[int] = ChunkScheduler(step, block * rng.randrange(1, 20), block)
    totals = {n: rng.randrange(1, 500) for n in range(rng.randrange(1, 12))}
    computed = {n: rng.randrange(total) // block * block for n, total in totals.items()}
    for n, total in totals.items():
        scheduler.add(n, total, computed[n])
    under_way: deque[list[Chunk[int]]] = deque()
    for _ in range(10_000):
        chunks = scheduler.plan()
        if chunks:
            under_way.append(chunks)
        if not under_way:
            break
        assert sum(chunk.end - chunk.start for chunk in chunks) <= step
        assert len({chunk.key for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.start < chunk.end
            assert chunk.last == (chunk.end == totals[chunk.key])
            assert chunk.last or chunk.end % block == 0
        if chunks and len(under_way) < rng.choice([1, 2, 3]):
            continue
        for chunk in under_way.popleft():
            if not scheduler.follows(chunk) or (rng.random() < 0.2 and scheduler.cut(chunk)):
                continue
            assert chunk.start == computed[chunk.key]
            computed[chunk.key] = chunk.end
            scheduler.commit(chunk)
    assert computed == totals
    assert scheduler.remaining_tokens == 0


def test_chunks_smaller_than_a_block_still_go_on() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(4, 4, 16)
    scheduler.add("a", 40, 0)
    scheduler.add("b", 20, 0)
    assert set(steps_until_done(scheduler)) == {"a", "b"}


def test_draws_take_their_share_of_a_step() -> None:
    """Sixteen prompts that draw sixteen times each are not all drawn in one step."""
    scheduler: ChunkScheduler[int] = ChunkScheduler(512, 512, 16)
    for key in range(16):
        scheduler.add(key, 16, 0, draws_s=16 * 0.01)
    steps = []
    while chunks := scheduler.plan(tokens_per_s=1000.0):
        assert sum(c.end - c.start + 160 * c.last for c in chunks) <= 512
        commit(scheduler, chunks)
        steps.append(sum(chunk.last for chunk in chunks))
    assert sum(steps) == 16 and max(steps) == 2


def test_a_prompt_waits_with_its_end_where_its_draws_do_not_fit() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(512, 512, 16)
    scheduler.add("old", 100, 0)
    scheduler.add("dear", 40, 0, draws_s=1.0)
    first = scheduler.plan(tokens_per_s=500.0)
    assert [(c.key, c.end, c.last) for c in first] == [("old", 100, True), ("dear", 32, False)]
    (second,) = scheduler.plan(tokens_per_s=500.0)
    assert (second.key, second.start, second.last) == ("dear", 32, True)


def test_the_first_prompt_draws_whatever_it_costs() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 64, 16)
    scheduler.add("dear", 16, 0, draws_s=100.0)
    scheduler.add("next", 20, 0)
    assert [chunk.key for chunk in scheduler.plan()] == ["dear", "next"]  # no speed is known yet


def test_dear_draws_wait_for_prompts_that_cost_less() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 64, 16)
    scheduler.add("dear", 16, 0, draws_s=1.0)
    scheduler.add("next", 40, 0)
    assert [chunk.key for chunk in scheduler.plan(tokens_per_s=1000.0)] == ["next"]
    assert [chunk.key for chunk in scheduler.plan(tokens_per_s=1000.0)] == ["dear"]
