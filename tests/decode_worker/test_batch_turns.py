"""Which requests share a step: those computed alone, and those of several choices, take turns."""

from __future__ import annotations

import pytest

from baton.decode_worker.sequences import Phase, Request, Sequence
from baton.decode_worker.step_plan import StepPlan
from baton.engine.scheduling.blocks import Hold
from tests.support.scheduler_bench import SIZE, Bench


def test_requests_that_are_alone_share_no_step_and_take_turns() -> None:
    """Prefill and decode alike; the others have every other step."""
    bench = Bench(local_prefill_tokens=12)
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
    assert found == [{requests[3]}, {requests[1]}] * 2  # no other request waits for a step
    for request in requests:
        bench.end(request)
    bench.pool.check()


def test_requests_of_several_choices_leave_room_in_the_batch() -> None:
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


def test_a_lone_request_that_preempts_itself_frees_the_step() -> None:
    bench = Bench(blocks=8, expected_growth_tokens=1, waiting_share=1.0)
    older, alone = (bench.submit([number] * 7, max_tokens=24) for number in range(2))
    alone.alone = True
    while not bench.scheduler.preemptions:
        plan = bench.step()
    assert [sequence.request for sequence in plan.decoding] == [older]
    bench.end(older)
    bench.end(alone)
    bench.pool.check()


def one_ahead(bench: Bench, under_way: list[StepPlan]) -> None:
    """Plan the next step beside the one under way; commit the older one, or that one if no step
    could be planned beside it."""
    if plan := bench.scheduler.plan():
        under_way.append(plan)
    if not plan or len(under_way) == 2:
        bench.commit(under_way.pop(0))


def up_to_its_last_slot(bench: Bench, request: Request) -> Sequence:
    """Compute the request until its blocks have room for one token more."""
    (sequence,) = request.sequences
    while not sequence.blocks or sequence.computed + 1 < len(sequence.blocks) * SIZE:
        bench.step()
    return sequence


@pytest.mark.parametrize("grower_is_alone", [False, True])
def test_a_turn_without_a_block_is_kept(grower_is_alone: bool) -> None:
    """Beside a step of the other request nothing is preempted. A turn that was used up there would
    come again beside the next such step, until the other request is over."""
    bench = Bench(blocks=24, expected_growth_tokens=1, local_prefill_tokens=4)
    grows = bench.submit([1] * 7, max_tokens=40)
    sequence = up_to_its_last_slot(bench, grows)
    computes = bench.submit([2] * 48, max_tokens=4)
    (grows if grower_is_alone else computes).alone = True
    bench.scheduler.admit()
    taken = bench.pool.allocate(bench.pool.available, Hold.USED)
    room, under_way = len(sequence.blocks) * SIZE, list[StepPlan]()
    for _ in range(8):
        one_ahead(bench, under_way)
    assert bench.scheduler.preemptions == 1 and sequence.computed > room
    for plan in under_way:
        bench.commit(plan)
    bench.end(grows), bench.end(computes)
    bench.pool.release(taken, Hold.USED)
    bench.pool.check()


def test_a_turn_is_kept_until_a_grant_gives_its_block() -> None:
    """A step of the other request in between would let the grant take its blocks again."""
    bench = Bench(blocks=26, expected_growth_tokens=1, local_prefill_tokens=4, waiting_share=1.0)
    grows = bench.submit([1] * 7, max_tokens=40)
    sequence = up_to_its_last_slot(bench, grows)
    computes = bench.submit([2] * 48, max_tokens=4)
    computes.alone = True
    bench.scheduler.admit()
    fetching = bench.grant([3] * 16)
    taken = bench.pool.allocate(bench.pool.available, Hold.USED)
    room = len(sequence.blocks) * SIZE
    for _ in range(6):
        bench.step()
        if bench.scheduler.starved and bench.scheduler.granted[-1].phase is Phase.FETCHING:
            bench.scheduler.requeue(bench.scheduler.granted[-1])
    assert sequence.computed > room and bench.scheduler.preemptions == 0
    for request in (grows, computes, fetching.request):
        bench.end(request)
    bench.pool.release(taken, Hold.USED)
    bench.pool.check()
