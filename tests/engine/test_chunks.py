"""The chunk scheduler: budget, borders, fairness, and an end for every prompt."""

from __future__ import annotations

import random

import pytest

from baton.engine.chunks import Chunk, ChunkScheduler


def steps_until_done(scheduler: ChunkScheduler[str], limit: int = 1000) -> dict[str, int]:
    """Run to the end; the step in which each prompt finished."""
    done: dict[str, int] = {}
    for step in range(limit):
        chunks = scheduler.plan()
        if not chunks:
            return done
        scheduler.commit(chunks)
        done.update({chunk.key: step for chunk in chunks if chunk.last})
    raise AssertionError("the prompts never end")


def test_one_prompt_goes_in_chunks_that_end_on_block_borders() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(512, 256, 16)
    scheduler.add("a", 600, 0)
    seen: list[Chunk[str]] = []
    while chunks := scheduler.plan():
        seen += chunks
        scheduler.commit(chunks)
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


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 64, 16)
    scheduler.add("long", 3200, 0)
    for step in range(101):
        for n in range(4):
            scheduler.add(f"short-{step}-{n}", 16, 0)
        chunks = scheduler.plan()
        scheduler.commit(chunks)
        if any(chunk.key == "long" and chunk.last for chunk in chunks):
            assert step == 99  # half of every step was its own
            return
    raise AssertionError("the long prompt starved")


def test_a_cancelled_prompt_leaves_the_plan_and_a_late_commit_is_harmless() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(64, 64, 16)
    scheduler.add("a", 640, 0)
    chunks = scheduler.plan()
    scheduler.remove("a")
    scheduler.commit(chunks)
    assert len(scheduler) == 0 and scheduler.plan() == []


@pytest.mark.parametrize("seed", range(30))
def test_any_mix_respects_the_budget_and_ends(seed: int) -> None:
    rng = random.Random(seed)
    block = rng.choice([1, 4, 16])
    step = block * rng.randrange(1, 40)
    scheduler: ChunkScheduler[int] = ChunkScheduler(step, block * rng.randrange(1, 20), block)
    totals = {n: rng.randrange(1, 500) for n in range(rng.randrange(1, 12))}
    computed = {n: rng.randrange(total) // block * block for n, total in totals.items()}
    for n, total in totals.items():
        scheduler.add(n, total, computed[n])
    for _ in range(10_000):
        chunks = scheduler.plan()
        if not chunks:
            break
        assert sum(chunk.end - chunk.start for chunk in chunks) <= step
        assert len({chunk.key for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.start == computed[chunk.key] < chunk.end
            assert chunk.last == (chunk.end == totals[chunk.key])
            assert chunk.last or chunk.end % block == 0
            computed[chunk.key] = chunk.end
        scheduler.commit(chunks)
    assert computed == totals
    assert scheduler.remaining_tokens == 0


def test_chunks_smaller_than_a_block_still_go_on() -> None:
    scheduler: ChunkScheduler[str] = ChunkScheduler(4, 4, 16)
    scheduler.add("a", 40, 0)
    scheduler.add("b", 20, 0)
    assert set(steps_until_done(scheduler)) == {"a", "b"}
