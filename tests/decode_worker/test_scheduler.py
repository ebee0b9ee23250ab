"""The decode scheduler by itself: grants in order, growth, preemption, forks, ends."""

from __future__ import annotations

import pytest

from baton.decode_worker.sequences import Phase
from baton.engine.scheduling.blocks import Hold
from baton.engine.scheduling.draw_costs import DrawCosts
from baton.proto import worker_pb2
from baton.runtime import identity
from baton.runtime.errors import (
    InvalidRequest,
    OutOfBlocks,
    Overloaded,
)
from tests.support.scheduler_bench import KEY, ROOT, SIZE, Bench


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


def test_a_grant_leases_unmatched_blocks_until_revoked() -> None:
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


def test_fetched_choices_share_full_blocks_and_copy_partial_ones() -> None:
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


@pytest.mark.parametrize("private", [False, True])
def test_private_blocks_and_their_growth_are_not_published(private: bool) -> None:
    """They were fetched from less precise KV than the worker stores."""
    bench = Bench()
    group = bench.grant(list(range(10)))
    group.sequences[0].output.append(7)
    group.private = private
    bench.scheduler.fetched(group)
    for _ in range(4):
        bench.step()
    names = identity.chain(KEY, ROOT, [*range(10), 7, 7, 7, 7], SIZE)
    assert bench.pool.held_prefix(names) == (0 if private else 3)
    bench.end(group.request)
    assert bench.pool.counts().free == (bench.pool.total if private else bench.pool.total - 3)
    bench.pool.check()


def test_a_preempted_sequence_is_computed_again_and_published() -> None:
    bench = Bench()
    group = bench.grant(list(range(10)))
    (sequence,) = group.sequences
    sequence.output.append(7)
    group.private = True
    bench.scheduler.fetched(group)
    bench.scheduler.preempt_youngest()
    while not sequence.blocks:
        bench.scheduler.admit()
        bench.step()
    names = identity.chain(KEY, ROOT, list(range(8)), SIZE)
    assert bench.pool.held_prefix(names) == 2 and not sequence.private
    bench.end(group.request)


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


def test_a_group_with_first_tokens_does_not_draw_them_again() -> None:
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


def test_a_sequence_without_a_block_waits_for_a_revocable_grant() -> None:
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


def test_what_can_never_fit_and_what_is_too_much_is_refused() -> None:
    bench = Bench(blocks=4, max_queue=1)
    with pytest.raises(InvalidRequest, match="needs 6 KV blocks and this worker's pool has 4"):
        bench.submit([1] * 4, max_tokens=20)
    bench.submit([1] * 4, max_tokens=4)
    with pytest.raises(Overloaded, match="1 requests wait"):
        bench.submit([2] * 4, max_tokens=4)


def test_no_request_is_admitted_while_a_sequence_needs_a_block() -> None:
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


def test_a_request_waiting_for_a_quarantine_blocks_no_other() -> None:
    bench = Bench(blocks=8)
    stuck = bench.pool.allocate(2, Hold.QUARANTINED)
    large = bench.submit([1] * 22, max_tokens=4)
    small = bench.submit([2] * 4, max_tokens=4)
    assert [group.request for group in bench.scheduler.admit()] == [small]
    bench.end(small)
    bench.pool.release(stuck, Hold.QUARANTINED)
    assert [group.request for group in bench.scheduler.admit()] == [large]


def test_what_readers_pin_is_promised_to_no_request() -> None:
    """A sequence that grows would otherwise preempt another one, although both had credit."""
    bench = Bench(blocks=8)
    first = bench.submit(list(range(16)), max_tokens=1)
    bench.step(), bench.step()
    bench.end(first)
    names = identity.chain(KEY, ROOT, list(range(16)), SIZE)
    pins = bench.pool.pin_cached(names, list(range(16)), 0)
    bench.submit([9] * 12)  # three blocks, and two of growth
    assert len(pins) == 4 == bench.pool.available
    assert bench.scheduler.admit() == []
    bench.pool.unpin(pins)
    assert len(bench.scheduler.admit()) == 1
    assert bench.pool.available - bench.scheduler.promised_blocks == 8 - 5


@pytest.mark.parametrize(("choices", "computed"), [(1, 2), (3, 1)])
def test_first_tokens_of_all_choices_take_their_share(choices: int, computed: int) -> None:
    bench = Bench(costs=DrawCosts(greedy_s=1.0), local_prefill_tokens=16)
    bench.submit([1] * 4)
    bench.submit([2] * 4, n=choices)
    bench.scheduler.admit()
    plan = bench.scheduler.plan(tokens_per_s=4.0)  # 16 tokens, four of which a draw takes
    assert len(plan.chunks) == computed


def test_larger_blocks_of_a_candidate_wait_for_no_quarantine() -> None:
    """42 tokens are 11 blocks of 4, or 3 of 16, for which 4 quarantined ones leave no room."""
    bench = Bench(blocks=15, expected_growth_tokens=1)
    bench.pool.quarantine(bench.pool.lease(4))
    prompt = list(range(42))
    request = bench.submit(prompt, local=False, max_tokens=2)
    request.candidates = [worker_pb2.Candidate(worker_id="p", block_size=16)]
    (group,) = bench.scheduler.admit()
    assert len(group.blocks) == 11 and bench.scheduler.waiting == 0
