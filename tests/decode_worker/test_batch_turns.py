"""Which requests share a step: those computed alone, and those of several choices, take turns."""

from __future__ import annotations

from tests.support.scheduler_bench import Bench


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
    assert found == [{requests[3]}, {requests[1]}] * 2  # nobody else waits for a step
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
