"""What a step leaves: of sequences that ended, slices that failed or broke, and copied blocks."""

from __future__ import annotations

import pytest

from baton.decode_worker.sequences import Group
from baton.engine.scheduling.blocks import Hold
from baton.runtime import identity
from baton.runtime.errors import (
    EngineError,
    OutOfMemory,
)
from tests.support.scheduler_bench import KEY, ROOT, SIZE, Bench


def test_a_sequence_that_ends_during_a_step_is_freed_after_it() -> None:
    bench = Bench()
    request = bench.submit([1] * 6)
    bench.scheduler.admit()
    plan = bench.scheduler.plan()
    bench.end(request)
    assert bench.pool.counts().used == 2  # the device still writes there
    outcome = bench.scheduler.commit(plan, bench.result(plan))
    assert outcome.drawn == [] or all(s.ended for s, _ in outcome.drawn)
    assert bench.pool.available == bench.pool.total


@pytest.mark.parametrize("planned", [False, True])
def test_a_choice_that_ended_before_its_first_token_has_none(planned: bool) -> None:
    """Also where its draw was planned before it ended: the step has a token for it."""
    bench = Bench()
    request = bench.submit([1] * 6, n=2)
    gone, stays = request.sequences
    bench.scheduler.admit()
    if not planned:
        bench.scheduler.end(gone)
    plan = bench.scheduler.plan()
    if planned:
        bench.scheduler.end(gone)
    outcome = bench.scheduler.commit(plan, bench.result(plan))
    assert [sequence for sequence, _ in outcome.drawn] == [stays] and outcome.tokens == 1
    bench.scheduler.end(stays)
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


def test_an_uncomputed_slice_fails_alone_and_leaves_the_cache() -> None:
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


def forked(bench: Bench) -> Group:
    """Two choices whose handoff is over: they run, the partial block is still to be copied."""
    group = bench.grant(list(range(10)), n=2)
    for sequence in group.sequences:
        sequence.output.append(1)
    bench.scheduler.fetched(group)
    return group


def test_blocks_in_a_step_outlive_the_end_of_their_request() -> None:
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
def test_a_copy_needs_only_the_sequence_of_its_target(
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
