"""The prefill scheduler: blocks for all of a prompt or none, offers in order, pins to the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.context import Context

from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.scheduling.draw_costs import ZERO_COSTS, DrawCosts
from baton.kv_transfer.granter import Computed
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import PrefillScheduler, StepPlan
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import identity
from baton.runtime.config import StepConfig
from baton.runtime.errors import EngineError, InvalidRequest, OutOfMemory, Overloaded
from baton.runtime.sampling import SamplingParams

SIZE = 4
ROOT = identity.root(b"key", "model", "float32")


class Bench:
    """A scheduler, its pool, and steps that succeed."""

    def __init__(self, blocks: int = 32, costs: DrawCosts = ZERO_COSTS, **step: int) -> None:
        settings = StepConfig(**{"prefill_tokens": 16, "chunk_tokens": 8, **step})
        self.fresh: list[int] = []
        self.pool = BlockPool(blocks, SIZE)
        self.failed: set[bytes] = set()  # boot ids of sources that may not be asked
        self.scheduler = PrefillScheduler(
            self.pool,
            settings,
            self.fresh.extend,
            costs,
            lambda source: source.boot_id not in self.failed,
        )

    def submit(self, tokens: list[int], held: int = 0, choices: int = 1, **fields: Any) -> Prompt:
        prompt = Prompt(
            request_id="r",
            tokens=tokens,
            prompt_tokens=len(tokens),
            held_blocks=held,
            params=SamplingParams(),
            choices=list(range(choices)),
            identities=identity.chain(b"key", ROOT, tokens, SIZE),
            tenant=b"t",
            trace=Context(),
            arrived_wall_s=0.0,
            on_end=self.scheduler.end,
            **fields,
        )
        self.scheduler.submit(prompt)
        return prompt

    def step(
        self,
        broken: frozenset[int] = frozenset(),
        failed: Mapping[int, EngineError] | None = None,
    ) -> int:
        """One step; how many tokens it computed."""
        self.scheduler.admit()
        plan = self.scheduler.plan()
        drawn = tuple(tuple(Drawn(d.choice, 7) for d in piece.draws) for piece in plan.batch.slices)
        self.scheduler.commit(plan, StepResult(drawn, broken=broken, failed=failed or {}))
        return sum(len(piece.tokens) for piece in plan.batch.slices)

    def run(self) -> None:
        while self.step():
            pass


def events(prompt: Prompt) -> list[str]:
    """What the granter will see, in short."""
    seen = []
    while not prompt.events.empty():
        event = prompt.events.get_nowait()
        if isinstance(event, Computed):
            partial = f" partial {event.partial_tokens}" if event.partial_tokens else ""
            seen.append(f"offer {event.first}+{len(event.blocks)}{partial}")
        elif isinstance(event, handoff_pb2.FirstTokens):
            seen.append(f"first {len(event.tokens)} cached {event.cached_tokens}")
        else:
            seen.append(repr(event))
    return seen


def test_offers_follow_the_chunks_and_end_with_the_partial_block() -> None:
    bench = Bench()
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
    bench = Bench()
    first = bench.submit(list(range(20)))
    bench.run()
    first.end()
    second = bench.submit(list(range(20)))
    bench.scheduler.admit()
    assert events(second) == ["offer 0+4"]  # before any step
    assert bench.step() == 4
    assert events(second) == ["offer 4+1", "first 1 cached 16", "None"]


def test_blocks_held_by_the_reader_are_computed_but_not_offered() -> None:
    bench = Bench()
    prompt = bench.submit(list(range(20)), held=3)
    bench.run()
    assert events(prompt) == ["offer 3+1", "offer 4+1", "first 1 cached 0", "None"]
    assert bench.pool.counts().pinned == 2


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    bench = Bench(blocks=8)
    first = bench.submit([1] * 20)
    second = bench.submit([2] * 20)
    bench.run()
    assert bench.scheduler.waiting == 1 and events(second) == []
    first.end()
    bench.run()
    assert events(second)[-1] == "None"


def test_a_prompt_that_never_fits_and_a_full_queue_are_refused() -> None:
    bench = Bench(blocks=4, max_queue=1)
    with pytest.raises(InvalidRequest, match="needs 5 KV blocks and the prefill pool has 4"):
        bench.submit([1] * 17)
    bench.submit([1] * 16)
    with pytest.raises(Overloaded):
        bench.submit([2] * 4)


def test_the_end_frees_a_waiting_prompt_and_one_in_progress() -> None:
    bench = Bench(blocks=8)
    running = bench.submit([1] * 24)
    waiting = bench.submit([2] * 24)
    bench.step()
    waiting.end()
    running.end()
    assert bench.scheduler.waiting == 0 and bench.scheduler.queued_tokens == 0
    assert bench.pool.available == 8


def test_the_end_during_a_step_frees_with_the_step() -> None:
    bench = Bench()
    prompt = bench.submit([1] * 8)
    bench.scheduler.admit()
    plan = bench.scheduler.plan()
    prompt.end()
    assert bench.pool.counts().used == 2  # the device still writes there
    bench.scheduler.commit(plan, StepResult(((Drawn(0, 1),),)))
    assert bench.pool.available == bench.pool.total
    assert bench.pool.counts().cached == 0  # nobody knows what was computed


def test_broken_numbers_fail_the_prompt_and_are_not_cached() -> None:
    bench = Bench()
    prompt = bench.submit([1] * 12)
    bench.step()
    bench.step(broken=frozenset({0}))
    assert any("EngineError" in event for event in events(prompt))
    prompt.end()
    assert bench.pool.counts().free == bench.pool.total


def test_a_prompt_that_was_not_computed_fails_alone() -> None:
    bench = Bench()
    bad, good = bench.submit([1] * 8), bench.submit([2] * 8)
    bench.step(failed={0: EngineError("no luck")})
    bench.run()
    assert any("no luck" in event for event in events(bad))
    assert events(good)[-1] == "None"
    bad.end(), good.end()
    assert bench.pool.available == bench.pool.total


def test_a_chunk_too_large_for_memory_is_cut_before_failing() -> None:
    bench = Bench()
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


def two_steps(bench: Bench) -> tuple[Prompt, StepPlan, StepPlan]:
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
    bench = Bench()
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
    bench = Bench()
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
    bench = Bench()
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
    bench = Bench(max_prompts=1)
    first, second = bench.submit([1] * 8), bench.submit([2] * 8)
    bench.scheduler.admit()
    bench.scheduler.abandon_step(bench.scheduler.plan(), EngineError("device"))
    first.end()
    bench.run()
    assert events(second)[-1] == "None"


def test_fresh_blocks_are_announced_before_they_get_new_content() -> None:
    bench = Bench(blocks=4)
    first = bench.submit([1] * 16)
    bench.run()
    first.end()
    seen = list(bench.fresh)
    second = bench.submit([2] * 8)
    bench.run()
    assert len(seen) == 4 and set(bench.fresh[4:]) == set(second.pinned)


async def test_a_stop_fails_unfinished_prompts_and_no_complete_one() -> None:
    bench = Bench(max_prompts=1)
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


class CountedPool:
    """Counts how many blocks a pool compares with a prompt's tokens."""

    def __init__(self, pool: BlockPool) -> None:
        self.compared = 0
        self._match = pool.match
        pool.match = self.match  # type: ignore[method-assign]

    def match(self, identities: Any, tokens: Any, hold: Any, limit: int, first: int = 0) -> Any:
        found = self._match(identities, tokens, hold, limit, first)
        self.compared += len(found)
        return found


def blocked_prompt(bench: Bench) -> tuple[Prompt, Prompt]:
    """One that keeps its blocks pinned, and one that waits for them, half of it cached."""
    cached, other = list(range(33)), list(range(100, 140))
    first = bench.submit(cached)
    while bench.step():
        pass
    first.end()
    keeps = bench.submit(other)
    while bench.step():
        pass
    return keeps, bench.submit(cached + list(range(200, 232)))


def test_a_blocked_prompt_is_matched_once_over_all_tries() -> None:
    bench = Bench(blocks=20)
    keeps, waits = blocked_prompt(bench)
    counted = CountedPool(bench.pool)
    for _ in range(10):
        assert bench.scheduler.admit() == []
    assert counted.compared == len(waits.blocks) == 8
    keeps.end()
    assert bench.scheduler.admit() == [waits] and waits.cached == 8
    assert counted.compared == 8


def test_blocked_prompt_matches_what_is_published_while_it_waits() -> None:
    bench = Bench(blocks=20)
    first = bench.submit(list(range(49)))
    waits = bench.submit(list(range(64)))
    bench.scheduler.admit()
    before = len(waits.blocks)
    bench.step()
    bench.scheduler.admit()
    assert len(waits.blocks) > before
    while bench.step():
        pass
    first.end()
    assert waits.cached > before and len(waits.blocks) == 0  # computed, and all pinned by now


@pytest.mark.parametrize("how", ["ended", "stopped"])
def test_blocked_prompt_frees_what_it_matched_when_it_is_over(how: str) -> None:
    bench = Bench(blocks=20)
    keeps, waits = blocked_prompt(bench)
    bench.scheduler.admit()
    if how == "stopped":
        bench.scheduler.stop(Overloaded("over"))
    waits.end()
    keeps.end()
    bench.pool.check()
    assert bench.pool.available == bench.pool.total


@pytest.mark.parametrize("fails", [False, True])
def test_a_source_that_fails_while_a_prompt_waits_is_not_read(fails: bool) -> None:
    bench = Bench(blocks=4)
    first, second = bench.submit([1] * 16), bench.submit([2] * 12)
    worker = worker_pb2.Candidate(worker_id="decode-0", boot_id=b"d" * 16)
    second.source = worker_pb2.Source(worker=worker, blocks=2)
    assert bench.scheduler.admit() == [first]
    if fails:
        bench.failed.add(worker.boot_id)
    first.end()
    assert bench.scheduler.admit() == [second]
    assert second.reading_to == (0 if fails else 2)
    assert bench.scheduler.reading == (0 if fails else 1)


@pytest.mark.parametrize(("choices", "computed"), [(1, 2), (3, 1)])
def test_first_tokens_of_all_choices_take_their_share(choices: int, computed: int) -> None:
    bench = Bench(costs=DrawCosts(greedy_s=1.0))
    bench.submit([1] * 4)
    bench.submit([2] * 4, choices=choices)
    bench.scheduler.admit()
    plan = bench.scheduler.plan(tokens_per_s=4.0)  # 16 tokens, four of which a draw takes
    assert len(plan.chunks) == computed


def converted(prompt: Prompt) -> list[tuple[int, int, int]]:
    """The first index of each offer, its blocks, and the targets that it brings."""
    seen = []
    while not prompt.events.empty():
        event = prompt.events.get_nowait()
        if isinstance(event, Computed):
            seen.append((event.first, len(event.blocks), len(event.targets)))
    return seen


@pytest.mark.parametrize("each", [1, 2])
def test_targets_are_reserved_at_admission_and_come_with_offers(each: int) -> None:
    bench = Bench()
    prompt = bench.submit(list(range(22)), held=1, converted_each=each)
    bench.scheduler.admit()
    assert bench.pool.counts().pinned == 5 * each  # of those that the reader lacks
    assert set(prompt.reserve) <= set(bench.fresh)
    bench.run()
    assert converted(prompt) == [(1, 1, each), (2, 2, 2 * each), (4, 1, each), (5, 1, each)]
    assert not prompt.reserve and len(set(prompt.targets)) == 5 * each
    prompt.end()
    assert bench.pool.counts().pinned == 5 * each  # the granter unpins them
    bench.pool.unpin(prompt.targets)
    assert bench.pool.available == bench.pool.total
    bench.pool.check()


def test_a_prompt_waits_for_its_targets_too() -> None:
    bench = Bench(blocks=15)
    first = bench.submit([1] * 20, converted_each=1)
    second = bench.submit([2] * 20, converted_each=1)
    bench.run()
    assert bench.scheduler.waiting == 1 and not second.reserve
    first.end()
    bench.pool.unpin(first.targets)
    bench.run()
    assert events(second)[-1] == "None"


def test_a_prompt_whose_targets_never_fit_is_refused() -> None:
    bench = Bench(blocks=9)
    said = "needs 5 KV blocks, 5 more for a reader of another KV dtype, and the prefill pool has 9"
    with pytest.raises(InvalidRequest, match=said):
        bench.submit([1] * 20, converted_each=1)
    bench.submit([1] * 20, held=1, converted_each=1)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_end_frees_targets_that_were_not_offered(steps: int) -> None:
    bench = Bench()
    prompt = bench.submit(list(range(22)), converted_each=2)
    bench.scheduler.admit()
    for _ in range(steps):
        bench.step()
    prompt.end()
    assert bench.pool.counts().pinned == len(prompt.targets) == 4 * steps
    bench.pool.unpin(prompt.targets)
    assert bench.pool.available == bench.pool.total


def test_private_blocks_are_offered_and_not_cached() -> None:
    bench = Bench()
    prompt = bench.submit(list(range(20)), private=True)
    bench.run()
    assert [event[:5] for event in events(prompt)[:2]] == ["offer", "offer"]
    prompt.end()
    assert bench.pool.counts().free == bench.pool.total
