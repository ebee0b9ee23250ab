"""The decode scheduler with a step planned while another runs: fed tokens, and late commits."""

from __future__ import annotations

from typing import Any

import pytest

from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group, Request, Sequence
from baton.decode_worker.step_plan import StepOutcome, StepPlan
from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.runtime import identity
from baton.runtime.config import StepConfig
from baton.runtime.errors import EngineError, OutOfMemory
from baton.runtime.sampling import SamplingParams
from tests.support.scripted_request import scripted_request
from tests.support.worker_parts import waiting_groups

SIZE = 4
KEY = b"key"
ROOT = identity.root(KEY, "model", "float32")


class Bench:
    """A scheduler with its pool; the n-th draw of the bench is token n."""

    def __init__(self, blocks: int = 64, **step: int | float) -> None:
        settings: dict[str, Any] = {"local_prefill_tokens": 8, "expected_growth_tokens": 8, **step}
        self.pool = BlockPool(blocks, SIZE)
        self.scheduler = DecodeScheduler(self.pool, StepConfig(**settings), KEY)
        self._clock = 0.0
        self._drawn = 100

    def submit(
        self,
        prompt: list[int],
        *,
        n: int = 1,
        max_tokens: int = 16,
        local: bool = True,
        **params: float,
    ) -> Request:
        self._clock += 1.0
        request = scripted_request(
            prompt,
            n=n,
            at_s=self._clock,
            max_tokens=max_tokens,
            local=local,
            root=ROOT,
            sampling=SamplingParams(**params),
        )
        self.scheduler.submit(request)
        self.scheduler.admit()
        return request

    def plan(self) -> StepPlan:
        self.scheduler.admit()
        return self.scheduler.plan()

    def commit(self, plan: StepPlan, **more: Any) -> StepOutcome:
        """The step is over, and its tokens are accepted."""
        drawn = [[Drawn(d.choice, self._next()) for d in s.draws] for s in plan.batch.slices]
        outcome = self.scheduler.commit(plan, StepResult(tuple(map(tuple, drawn)), **more))
        for sequence, token in outcome.drawn:
            assert not sequence.ended
            sequence.output.append(token.token)
            if len(sequence.output) == sequence.request.max_tokens:
                self.scheduler.end(sequence)
        return outcome

    def fetching(self, prompt: list[int]) -> Group:
        """The grant of a request whose prompt is computed elsewhere."""
        self.submit(prompt, local=False)
        return self.scheduler.granted[-1]

    def decoding(self, *prompts: list[int], **how: Any) -> list[Sequence]:
        """Sequences of one choice whose prompts are computed."""
        requests = [self.submit(prompt, **how) for prompt in prompts]
        while not all(request.sequences[0].output for request in requests):
            self.commit(self.plan())
        return [request.sequences[0] for request in requests]

    def end(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.end(sequence)

    def at_rest(self) -> bool:
        self.pool.check()
        return self.pool.available == self.pool.total

    def _next(self) -> int:
        self._drawn += 1
        return self._drawn


def shape(plan: StepPlan) -> list[tuple[list[int], int, int | None]]:
    return [(list(s.tokens), s.start, s.feed) for s in plan.batch.slices]


def test_the_next_step_takes_the_tokens_of_the_running_one() -> None:
    bench = Bench()
    one, two = bench.decoding([1] * 5, [2] * 6)
    tokens = [one.output[-1], two.output[-1]]
    starts = [one.computed, two.computed]
    first, second = bench.plan(), bench.plan()
    assert shape(first) == [([tokens[0]], starts[0], None), ([tokens[1]], starts[1], None)]
    assert shape(second) == [([0], starts[0] + 1, 0), ([0], starts[1] + 1, 1)]
    positions = [[s.draws[0].position for s in plan.batch.slices] for plan in (first, second)]
    assert positions == [[start + 1 for start in starts], [start + 2 for start in starts]]
    bench.commit(first)
    bench.end(one)
    third = bench.plan()
    assert shape(third) == [([0], starts[1] + 2, 1)]  # its place in the step before, not here
    bench.commit(second), bench.commit(third)
    assert shape(bench.plan()) == [([two.output[-1]], starts[1] + 3, None)]


def test_a_sequence_outside_the_running_step_is_not_fed() -> None:
    bench = Bench()
    (one,) = bench.decoding([1] * 5)
    first = bench.plan()
    bench.submit([2] * 3)
    second = bench.plan()
    assert shape(second) == [([0], one.computed + 1, 0), ([2, 2, 2], 0, None)]
    bench.commit(first)
    third = bench.plan()
    assert shape(third) == [([0], one.computed + 1, 0)]  # the other has no blocks of its own yet
    bench.commit(second)
    assert [feed for _, _, feed in shape(bench.plan())] == [0, None]


def test_penalties_see_all_known_tokens_and_the_fed_one() -> None:
    bench = Bench()
    (one,) = bench.decoding([1] * 5, frequency_penalty=0.5)
    first, second = bench.plan(), bench.plan()
    known = [*[1] * 5, *one.output]
    assert [list(p.batch.slices[0].draws[0].history) for p in (first, second)] == [known, known]
    bench.commit(first)
    assert list(bench.plan().batch.slices[0].draws[0].history) == [*[1] * 5, *one.output]


def test_nothing_is_computed_beyond_the_last_token() -> None:
    bench = Bench()
    (one,) = bench.decoding([1] * 5, max_tokens=3)
    first, second = bench.plan(), bench.plan()
    assert len(one.output) == 1
    assert not bench.plan()  # the third token is under way already
    bench.commit(first), bench.commit(second)
    assert len(one.output) == 3 and bench.at_rest()


def test_blocks_are_freed_with_the_last_step_that_writes_them() -> None:
    bench = Bench(blocks=8)
    (one,) = bench.decoding([1] * 6)
    first, second = bench.plan(), bench.plan()
    held = set(second.batch.slices[0].blocks)
    bench.commit(first)
    bench.end(one)
    assert not bench.plan()  # it is not computed again
    others = set(bench.pool.allocate(bench.pool.available, Hold.USED))
    assert not held & others
    bench.pool.release(list(others), Hold.USED)
    outcome = bench.commit(second)
    assert outcome.drawn == [] and one.blocks == []
    assert bench.at_rest()


@pytest.mark.parametrize("how", ["broken", "failed"])
def test_a_lost_slice_ends_its_sequence_and_leaves_the_next_step(how: str) -> None:
    bench = Bench()
    bad, good = bench.decoding([1] * 6, [2] * 6)
    first, second = bench.plan(), bench.plan()
    lost: Any = {0: EngineError("lost")} if how == "failed" else frozenset({0})
    outcome = bench.commit(first, **{how: lost})
    assert [s for s in outcome.broken] + [s for s, _ in outcome.failed] == [bad]
    bench.end(bad)
    third = bench.plan()
    assert [s for s, _ in bench.commit(second).drawn] == [good] == third.decoding
    bench.commit(third)
    bench.end(good)
    assert bench.at_rest()


def test_the_step_after_a_failed_one_keeps_other_sequences() -> None:
    bench = Bench()
    (old,) = bench.decoding([1] * 5)
    first = bench.plan()
    young = bench.submit([2] * 3).sequences[0]
    second = bench.plan()
    assert bench.scheduler.abandon_step(first) == [old]
    bench.end(old)
    assert [s for s, _ in bench.commit(second).drawn] == [young]
    bench.end(young)
    assert bench.at_rest()


def test_both_steps_may_fail() -> None:
    bench = Bench()
    (one,) = bench.decoding([1] * 5)
    request = bench.submit([2] * 30, n=2)
    first, second = bench.plan(), bench.plan()
    assert [len(plan.chunks) for plan in (first, second)] == [1, 1]
    lost = bench.scheduler.abandon_step(first)
    assert lost == [one, *request.sequences]
    bench.end(*lost)
    assert bench.pool.counts().used == len(one.blocks) + 8 + 1  # and the second choice's spare
    assert bench.scheduler.abandon_step(second) == []
    assert bench.at_rest() and bench.scheduler.running == 0


def test_no_sequence_is_preempted_during_a_step() -> None:
    """No token of a step under way is drawn twice, no block of it given to another."""
    bench = Bench(blocks=8, expected_growth_tokens=1)
    old, young = bench.decoding([1] * 7, [2] * 7)
    under_way: list[StepPlan] = []
    waited = 0
    while not bench.scheduler.preemptions:
        plan = bench.plan()
        if plan:
            under_way.append(plan)
        elif under_way:
            waited += 1
        if not plan or len(under_way) == 2:
            bench.commit(under_way.pop(0))
    assert waited == 1 and young in [g.sequences[0] for g in waiting_groups(bench.scheduler)]
    assert under_way == [plan] and plan.decoding == [old]
    assert young.blocks == [] and (old.under_way, young.under_way) == (1, 0)
    had = len(young.output)
    assert young.length == 7 + had
    bench.commit(plan)
    bench.end(old)
    (again,) = bench.plan().chunks
    assert again.key.tokens == [2] * 7 + young.output


def test_an_abandoned_prompt_gets_no_further_chunk() -> None:
    bench = Bench()
    request = bench.submit([1] * 30)
    first, second = bench.plan(), bench.plan()
    bench.end(*request.sequences)
    assert not bench.plan() and bench.scheduler.queued_tokens == 0
    bench.commit(first)
    assert bench.pool.counts().used == 8
    bench.commit(second)
    assert bench.at_rest()


def test_the_last_chunk_under_way_makes_its_choices_wait_a_step() -> None:
    bench = Bench()
    request = bench.submit([1] * 10, n=2)
    first, last = bench.plan(), bench.plan()
    assert last.chunks[0].last and not bench.plan()
    bench.commit(first), bench.commit(last)
    after = bench.plan()
    assert after.decoding == request.sequences
    assert len(after.batch.copies) == 1
    further = bench.plan()
    assert further.batch.copies == ()
    source = after.batch.copies[0][0]
    bench.end(request.sequences[0])
    bench.commit(after)
    assert bench.pool.writable(source)  # its own again: the copy is made
    bench.commit(further)
    assert [s.under_way for s in request.sequences] == [0, 0]
    bench.end(request.sequences[1])
    assert bench.at_rest()


def test_a_chunk_too_large_for_memory_is_cut_and_recomputed() -> None:
    bench = Bench()
    request = bench.submit([1] * 19)
    first, second = bench.plan(), bench.plan()
    short = {0: OutOfMemory("no memory")}
    assert bench.commit(first, failed=short) == StepOutcome()
    third = bench.plan()
    assert (third.chunks[0].start, third.chunks[0].end) == (0, 4)
    garbage = bench.commit(second, broken=frozenset({0}))
    assert garbage == StepOutcome()  # it read what is not there: that says nothing
    assert bench.scheduler.queued_tokens == 19
    group: Group = third.chunks[0].key
    failed = bench.commit(third, failed=short).failed  # one block is no less
    assert [s for s, _ in failed] == group.sequences == request.sequences
    bench.end(*request.sequences)
    assert bench.at_rest()


def test_the_oldest_is_never_skipped_while_a_younger_is_planned() -> None:
    """It has no block for its next token, and the younger one has: nothing is planned, so that
    the younger one can be preempted when the step under way is over."""
    bench = Bench(blocks=8, expected_growth_tokens=1, local_prefill_tokens=12)
    old, young = bench.decoding([1] * 7, [2] * 5)
    while len(old.blocks) * SIZE > old.computed:  # up to the end of its last block
        bench.commit(bench.plan())
    taken = bench.pool.allocate(bench.pool.available, Hold.USED)
    assert len(young.blocks) * SIZE > young.computed + 1
    old.ended = True  # sits this one out, so that a step without it is under way
    first = bench.scheduler.plan()
    old.ended = False
    assert first.decoding == [young]
    assert not bench.plan() and not bench.scheduler.starved
    assert bench.scheduler.preemptions == 0
    bench.commit(first)
    after = bench.plan()
    assert bench.scheduler.preemptions == 1 and after.decoding == [old]
    bench.commit(after)
    bench.end(old, young)
    bench.pool.release(taken, Hold.USED)


def test_waiting_for_a_revoked_grant_stops_no_other() -> None:
    """Its block comes from the grant, not from a younger sequence: they go on."""
    bench = Bench(blocks=16, expected_growth_tokens=1, waiting_share=1.0)
    old, young = bench.decoding([1] * 7, [2] * 5)
    while len(old.blocks) * SIZE > old.computed + 1:
        bench.commit(bench.plan())
    grant = bench.fetching([3] * 6)
    taken = bench.pool.allocate(bench.pool.available, Hold.USED)
    first = bench.plan()
    assert first.decoding == [old, young]
    second = bench.plan()
    assert bench.scheduler.starved and second.decoding == [young]
    assert bench.scheduler.youngest_fetching() is grant and bench.scheduler.preemptions == 0
    bench.commit(first), bench.commit(second)
    bench.scheduler.requeue(grant)
    assert old in bench.scheduler.plan().decoding
    bench.pool.release(taken, Hold.USED)


def test_a_sequence_that_ended_in_a_running_step_takes_no_row() -> None:
    bench = Bench(max_sequences=2)
    one, two = bench.decoding([1] * 5, [2] * 5)
    plan = bench.plan()
    waiting = bench.submit([3] * 5)
    assert (bench.scheduler.running, bench.scheduler.waiting) == (2, 1)
    bench.end(one)
    assert (bench.scheduler.running, bench.scheduler.waiting) == (1, 1)
    (group,) = bench.scheduler.admit()
    assert group.request is waiting and one.blocks
    bench.commit(plan)
    assert not one.blocks
    bench.end(two, *waiting.sequences)
    assert bench.at_rest()


def test_a_preempted_prompt_knows_how_much_of_it_was_computed() -> None:
    bench = Bench(blocks=7, expected_growth_tokens=1, local_prefill_tokens=4)
    (old,) = bench.decoding([1] * 7)
    while old.computed < 11:
        bench.commit(bench.plan())
    young = bench.submit([2] * 15, max_tokens=8)
    while not bench.scheduler.preemptions:
        bench.commit(bench.plan())
    assert bench.scheduler.running == 1 and young.sequences[0].output == []
    bench.end(old)
    (group,) = bench.scheduler.admit()
    assert group.request is young
    assert (group.local, group.recomputed_tokens, len(group.tokens)) == ("recompute", 4, 15)
