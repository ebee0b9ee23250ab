"""The decode scheduler by itself: grants in order, growth, preemption, forks, ends."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group, Phase, Request
from baton.decode_worker.step_plan import StepPlan
from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.runtime import identity
from baton.runtime.config import StepConfig
from baton.runtime.errors import (
    EngineError,
    InvalidRequest,
    OutOfBlocks,
    OutOfMemory,
    Overloaded,
)
from tests.support.scripted_request import scripted_request

SIZE = 4
KEY = b"key"
ROOT = identity.root(KEY, "model", "float32")


class Bench:
    """A scheduler with its pool, one step at a time; every drawn token is 7."""

    def __init__(self, blocks: int = 64, **step: int | float) -> None:
        settings: dict[str, int | float] = {
            "local_prefill_tokens": 8,
            "expected_growth_tokens": 8,
            "max_sequences": 16,
        }
        settings.update(step)
        self.pool = BlockPool(blocks, SIZE)
        self.scheduler = DecodeScheduler(
            self.pool,
            StepConfig(**settings),  # type: ignore[arg-type]
            KEY,
        )
        self._clock = 0.0

    def submit(
        self, prompt: list[int], *, local: bool = True, n: int = 1, max_tokens: int = 16
    ) -> Request:
        self._clock += 1.0
        request = scripted_request(
            prompt, n=n, at_s=self._clock, max_tokens=max_tokens, local=local, root=ROOT
        )
        self.scheduler.submit(request)
        return request

    def grant(self, prompt: list[int], *, n: int = 1) -> Group:
        """Submit for a handoff and admit: the group that is fetching."""
        self.submit(prompt, local=False, n=n)
        (group,) = self.scheduler.admit()
        return group

    def result(
        self,
        plan: StepPlan,
        broken: frozenset[int] = frozenset(),
        failed: Mapping[int, EngineError] | None = None,
    ) -> StepResult:
        drawn = tuple(tuple(Drawn(d.choice, 7) for d in piece.draws) for piece in plan.batch.slices)
        return StepResult(drawn, broken=broken, failed=failed or {})

    def step(self) -> StepPlan:
        self.scheduler.admit()
        plan = self.scheduler.plan()
        if plan:
            for sequence, token in self.scheduler.commit(plan, self.result(plan)).drawn:
                if not sequence.ended:
                    sequence.output.append(token.token)
        return plan

    def end(self, request: Request) -> None:
        for sequence in request.sequences:
            self.scheduler.end(sequence)


def test_a_local_prompt_goes_in_chunks_and_then_decodes() -> None:
    bench = Bench()
    request = bench.submit(list(range(10)))
    spans = []
    for _ in range(4):
        (piece,) = bench.step().batch.slices
        spans.append((piece.start, len(piece.tokens), len(piece.draws)))
    assert spans == [(0, 8, 0), (8, 2, 1), (10, 1, 1), (11, 1, 1)]
    assert request.sequences[0].output == [7, 7, 7]
    bench.end(request)
    assert bench.pool.available == bench.pool.total
    bench.pool.check()


def test_decoding_publishes_the_blocks_that_it_fills() -> None:
    bench = Bench()
    request = bench.submit(list(range(6)))
    for _ in range(4):
        bench.step()
    tokens = [*range(6), 7, 7]
    names = identity.chain(KEY, ROOT, tokens, SIZE)
    assert bench.pool.held_prefix(names) == 2
    bench.end(request)


def test_a_grant_leases_what_is_not_matched_and_frees_it_when_taken_back() -> None:
    bench = Bench()
    first = bench.submit(list(range(9)))
    bench.step(), bench.step()
    bench.end(first)
    group = bench.grant(list(range(14)))
    assert (group.phase, group.held, len(group.blocks)) == (Phase.FETCHING, 2, 4)
    assert bench.pool.counts().leased == 2
    bench.scheduler.requeue(group)
    assert bench.pool.available == bench.pool.total and bench.scheduler.waiting == 1


def test_grants_are_given_in_order_of_arrival() -> None:
    bench = Bench(blocks=8, waiting_share=1.0)
    first = bench.grant(list(range(12)))  # 3 blocks and 2 of growth
    bench.submit([9] * 12, local=False)
    bench.submit([8], local=False)  # would fit, and waits behind the older one
    assert bench.scheduler.admit() == []
    bench.scheduler.requeue(first)
    (again,) = bench.scheduler.admit()
    assert again.request is first.request  # it kept its place


def test_the_same_prompt_is_not_granted_beyond_the_batch() -> None:
    bench = Bench(max_sequences=2, waiting_share=1.0)
    requests = [bench.submit([n], local=False) for n in range(3)]
    assert len(bench.scheduler.admit()) == 2
    bench.end(requests[0])
    bench.scheduler.requeue(bench.scheduler.granted[0])
    assert [g.request for g in bench.scheduler.admit()] == [requests[2]]


def test_fetched_choices_share_full_blocks_and_copy_the_partial_one() -> None:
    bench = Bench()
    group = bench.grant(list(range(10)), n=3)
    for sequence in group.sequences:
        sequence.output.append(1)
    bench.scheduler.fetched(group)
    tables = [sequence.blocks for sequence in group.sequences]
    assert all(table[:2] == tables[0][:2] for table in tables)
    assert len({table[2] for table in tables}) == 3
    plan = bench.scheduler.plan()
    assert plan.batch.copies == ((tables[0][2], tables[1][2]), (tables[0][2], tables[2][2]))
    assert [(p.start, list(p.tokens)) for p in plan.batch.slices] == [(10, [1])] * 3
    bench.scheduler.commit(plan, bench.result(plan))
    bench.end(group.request)
    bench.pool.check()
    assert bench.pool.available == bench.pool.total


def test_a_choice_that_ended_during_the_fetch_takes_no_blocks() -> None:
    bench = Bench()
    group = bench.grant(list(range(10)), n=2)
    for sequence in group.sequences:
        sequence.output.append(1)
    bench.scheduler.end(group.sequences[0])
    bench.scheduler.fetched(group)
    assert bench.scheduler.running == 1
    bench.scheduler.end(group.sequences[1])
    assert bench.pool.available == bench.pool.total


def test_a_group_that_has_its_first_tokens_does_not_draw_them_again() -> None:
    """The handoff failed after the first tokens had gone out: prefilled here, undrawn."""
    bench = Bench()
    group = bench.grant(list(range(10)), n=2)
    for sequence in group.sequences:
        sequence.output.append(1)
    bench.scheduler.to_local(group)
    plans = [bench.step(), bench.step()]
    assert [len(p.batch.slices[0].draws) for p in plans] == [0, 0]
    plan = bench.step()
    assert [(p.start, list(p.tokens)) for p in plan.batch.slices] == [(10, [1]), (10, [1])]
    assert group.sequences[0].output == [1, 7]


def test_quarantined_destinations_are_replaced_or_the_grant_ends() -> None:
    bench = Bench(blocks=6)
    group = bench.grant(list(range(7)))
    rest = bench.pool.allocate(3, Hold.USED)
    bench.scheduler.reservations.quarantine(group, group.blocks[:1])
    assert group.blocks[0] == -1
    bench.scheduler.reservations.replace_leased(group)
    assert -1 not in group.blocks and bench.pool.counts().quarantined == 1
    bench.scheduler.reservations.quarantine(group, list(group.blocks))
    with pytest.raises(OutOfBlocks):
        bench.scheduler.reservations.replace_leased(group)
    bench.scheduler.requeue(group)
    assert bench.pool.counts().quarantined == 3 and bench.pool.counts().leased == 0
    bench.pool.release(rest, Hold.USED)


def test_the_youngest_makes_room_and_recomputes_all_it_had() -> None:
    bench = Bench(blocks=8, expected_growth_tokens=1)
    old, young = bench.submit([1] * 7), bench.submit([2] * 7)
    while not bench.scheduler.preemptions:
        bench.step()
    had = list(young.sequences[0].output)
    assert len(had) > 1 and bench.scheduler.running == bench.scheduler.waiting == 1
    bench.end(old)
    (group,) = bench.scheduler.admit()
    assert group.request is young and group.tokens == [2] * 7 + had
    assert (group.local, group.recomputed_tokens) == ("recompute", 7 + len(had))
    while not bench.scheduler.running:
        bench.step()
    assert young.sequences[0].output[: len(had)] == had


def test_a_request_that_waits_in_part_is_one_of_those_at_once() -> None:
    """Its preempted choices are groups of one in the line: requests are counted, not those."""
    bench = Bench(blocks=10, expected_growth_tokens=1)
    request = bench.submit([1] * 8, n=3, max_tokens=32)
    assert (bench.scheduler.active_requests, bench.scheduler.waiting) == (0, 1)
    while bench.scheduler.preemptions < 2:
        bench.step()
        assert bench.scheduler.active_requests == 1
    bench.submit([2] * 8)
    assert (bench.scheduler.running, bench.scheduler.waiting) == (1, 3)
    assert bench.scheduler.active_requests == 1
    bench.end(request)
    assert bench.scheduler.active_requests == 0


def test_a_sequence_without_a_block_waits_while_a_grant_can_be_taken_back() -> None:
    bench = Bench(blocks=8, expected_growth_tokens=1)
    request = bench.submit([1] * 7)
    bench.step()
    group = bench.grant([2] * 14)
    while not bench.scheduler.starved:
        bench.step()
    assert bench.scheduler.youngest_fetching() is group and bench.scheduler.preemptions == 0
    bench.scheduler.requeue(group)
    before = len(request.sequences[0].output)
    bench.scheduler.plan()
    assert not bench.scheduler.starved and before > 0


def test_a_sequence_that_ends_during_a_step_is_freed_with_the_step() -> None:
    bench = Bench()
    request = bench.submit([1] * 6)
    bench.scheduler.admit()
    plan = bench.scheduler.plan()
    bench.end(request)
    assert bench.pool.counts().used == 2  # the device still writes there
    outcome = bench.scheduler.commit(plan, bench.result(plan))
    assert outcome.drawn == [] or all(s.ended for s, _ in outcome.drawn)
    assert bench.pool.available == bench.pool.total


def test_a_failed_step_names_its_sequences_and_leaves_the_others() -> None:
    bench = Bench()
    inside = bench.submit([1] * 6)
    bench.scheduler.admit()
    plan = bench.scheduler.plan()
    outside = bench.submit([2] * 6)
    for sequence in bench.scheduler.abandon_step(plan):
        assert sequence.request is inside
        bench.scheduler.end(sequence)
    while not outside.sequences[0].output:
        bench.step()
    bench.end(outside)
    assert bench.pool.available == bench.pool.total


def test_a_broken_slice_is_not_published_and_the_others_go_on() -> None:
    bench = Bench()
    bad, good = bench.submit([1] * 6), bench.submit([2] * 6)
    bench.step(), bench.step()
    plan = bench.scheduler.plan()
    assert [s.request for s in plan.decoding] == [bad, good]
    outcome = bench.scheduler.commit(plan, bench.result(plan, broken=frozenset({0})))
    assert [s.request for s in outcome.broken] == [bad]
    assert [s.request for s, _ in outcome.drawn] == [good]
    bench.end(bad)
    assert bench.pool.held_prefix(identity.chain(KEY, ROOT, [1] * 6, SIZE)) == 0
    bench.end(good)
    bench.pool.check()


def test_a_slice_that_was_not_computed_fails_alone_and_leaves_the_cache() -> None:
    bench = Bench()
    bad, good, young = bench.submit([1] * 6), bench.submit([2] * 6), bench.submit([3] * 16)
    bench.step(), bench.step()
    plan = bench.scheduler.plan()
    assert [s.request for s in plan.decoding] == [bad, good]
    short, lost = OutOfMemory("no memory"), EngineError("lost")
    outcome = bench.scheduler.commit(plan, bench.result(plan, failed={0: short, 2: lost}))
    assert [(s.request, error) for s, error in outcome.failed] == [(bad, short), (young, lost)]
    assert [s.request for s, _ in outcome.drawn] == [good]
    assert not outcome.broken
    bench.end(bad), bench.end(young)
    assert bench.pool.held_prefix(identity.chain(KEY, ROOT, [1] * 6, SIZE)) == 1  # it is right
    before = plan.chunks[0].start // SIZE
    assert bench.pool.held_prefix(identity.chain(KEY, ROOT, [3] * 16, SIZE)) == before
    bench.end(good)
    assert bench.pool.available == bench.pool.total
    bench.pool.check()


def test_what_can_never_fit_and_what_is_too_much_is_refused() -> None:
    bench = Bench(blocks=4, max_queue=1)
    with pytest.raises(InvalidRequest, match="needs 6 KV blocks and this worker's pool has 4"):
        bench.submit([1] * 4, max_tokens=20)
    bench.submit([1] * 4, max_tokens=4)
    with pytest.raises(Overloaded, match="1 requests wait"):
        bench.submit([2] * 4, max_tokens=4)


def forked(bench: Bench) -> Group:
    """Two choices whose handoff is over: they run, the partial block is still to be copied."""
    group = bench.grant(list(range(10)), n=2)
    for sequence in group.sequences:
        sequence.output.append(1)
    bench.scheduler.fetched(group)
    return group


def test_blocks_of_a_prompt_in_a_step_stay_when_it_and_another_request_end() -> None:
    bench = Bench()
    prompt = bench.submit(list(range(6)))
    other = bench.submit([9] * 5, local=False)
    bench.scheduler.admit()
    plan = bench.scheduler.plan()
    computed_on = set(plan.batch.slices[0].blocks)
    bench.end(prompt)
    bench.end(other)
    free = set(bench.pool.allocate(bench.pool.available, Hold.USED))
    assert not computed_on & free
    bench.pool.release(list(free), Hold.USED)
    bench.scheduler.commit(plan, bench.result(plan))
    bench.scheduler.requeue(bench.scheduler.granted[0])
    assert bench.pool.available == bench.pool.total


@pytest.mark.parametrize("gone", [0, 1])
def test_a_copy_is_made_for_those_who_still_want_it_from_a_block_that_nobody_took(
    gone: int,
) -> None:
    bench = Bench()
    group = forked(bench)
    source, target = (sequence.blocks[2] for sequence in group.sequences)
    bench.scheduler.end(group.sequences[gone])
    taken = bench.pool.allocate(bench.pool.available, Hold.LEASED)
    plan = bench.scheduler.plan()
    assert plan.batch.copies == (((source, target),) if gone == 0 else ())
    assert not {block for copy in plan.batch.copies for block in copy} & set(taken)
    bench.scheduler.commit(plan, bench.result(plan))
    bench.end(group.request)
    bench.pool.release(taken, Hold.LEASED)
    bench.pool.check()
    assert bench.pool.available == bench.pool.total


def test_a_copy_whose_step_failed_holds_nothing() -> None:
    bench = Bench()
    group = forked(bench)
    plan = bench.scheduler.plan()
    assert plan.batch.copies
    for sequence in bench.scheduler.abandon_step(plan):
        bench.scheduler.end(sequence)
    assert all(sequence.ended for sequence in group.sequences)
    assert bench.pool.available == bench.pool.total


def test_nobody_is_let_in_while_a_sequence_waits_for_a_block() -> None:
    bench = Bench(blocks=6, waiting_share=1.0)
    old = bench.submit([1] * 4, max_tokens=16)
    bench.step()
    fetching = bench.grant([2] * 4)
    taken = bench.pool.allocate(bench.pool.available, Hold.USED)
    while not bench.scheduler.starved:
        bench.step()
    bench.scheduler.requeue(fetching)
    assert bench.scheduler.admit() == []  # the block that came back is the old one's
    bench.step()
    assert len(old.sequences[0].blocks) * SIZE > old.sequences[0].computed
    bench.pool.release(taken, Hold.USED)


def test_who_must_wait_for_a_quarantine_keeps_nobody_else_waiting() -> None:
    bench = Bench(blocks=8)
    stuck = bench.pool.allocate(2, Hold.QUARANTINED)
    large = bench.submit([1] * 22, max_tokens=4)
    small = bench.submit([2] * 4, max_tokens=4)
    assert [group.request for group in bench.scheduler.admit()] == [small]
    bench.end(small)
    bench.pool.release(stuck, Hold.QUARANTINED)
    assert [group.request for group in bench.scheduler.admit()] == [large]


def test_requests_that_are_alone_share_no_step_and_take_turns() -> None:
    """Prefill and decode alike; the others have every other step."""
    bench = Bench()
    requests = [bench.submit([number] * 6) for number in range(4)]
    requests[1].alone = requests[3].alone = True
    steps = []
    for _ in range(10):
        plan = bench.step()
        owners = {sequence.request for sequence in plan.decoding}
        owners |= {chunk.key.request for chunk in plan.chunks}
        steps.append({requests.index(owner) for owner in owners})
    assert steps[0::2] == [{1}, {3}, {1}, {3}, {1}] and steps[1::2] == [{0, 2}] * 5
    bench.end(requests[0])
    bench.end(requests[2])
    found = [{s.request for s in bench.step().decoding} for _ in range(4)]
    assert found == [{requests[3]}, {requests[1]}] * 2  # nobody else waits for a step
    for request in requests:
        bench.end(request)
    bench.pool.check()


def test_requests_of_several_choices_leave_others_room_in_the_batch() -> None:
    bench = Bench(blocks=200, max_sequences=16, choices_share=0.5, waiting_share=1.0)
    many = [bench.submit([number] * 4, n=6) for number in range(3)]
    bench.step()
    single = bench.submit([9] * 4)
    for _ in range(4):
        bench.step()
    running = {sequence.request for sequence in bench.step().decoding}
    assert running == {many[0], single}  # the second would be twelve of sixteen
    bench.end(many[0])
    bench.step()
    bench.step()
    assert many[1] in {sequence.request for sequence in bench.step().decoding}
    for request in [*many[1:], single]:
        bench.end(request)
    bench.pool.check()


def test_where_all_ask_for_several_choices_they_fill_the_batch() -> None:
    bench = Bench(blocks=400, max_sequences=16, choices_share=0.25, waiting_share=1.0)
    for _ in range(40):
        request = bench.submit([2] * 4, n=4)
        bench.step()
        bench.end(request)
    requests = [bench.submit([number] * 4, n=4) for number in range(6)]
    for _ in range(6):
        bench.step()
    assert len(bench.step().decoding) == 16
    for request in requests:
        bench.end(request)
    bench.pool.check()


def test_a_request_computed_alone_that_preempts_itself_leaves_others_the_step() -> None:
    bench = Bench(blocks=8, expected_growth_tokens=1, waiting_share=1.0)
    older, alone = (bench.submit([number] * 7, max_tokens=24) for number in range(2))
    alone.alone = True
    while not bench.scheduler.preemptions:
        plan = bench.step()
    assert [sequence.request for sequence in plan.decoding] == [older]
    bench.end(older)
    bench.end(alone)
    bench.pool.check()
