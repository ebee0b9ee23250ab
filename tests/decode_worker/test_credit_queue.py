"""The line for decode credit: order, bounds, and which request is passed over."""

from __future__ import annotations

import pytest

from baton.decode_worker import credit
from baton.decode_worker.credit_queue import QUARANTINE_WAIT_S, CreditQueue
from baton.decode_worker.sequences import Group
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.runtime.config import StepConfig
from baton.runtime.errors import InvalidRequest, Overloaded
from tests.support.scripted_request import scripted_request

SIZE = 4


def group(
    prompt: int = 8, arrived: float = 0.0, max_tokens: int = 8, n: int = 1, local: bool = True
) -> Group:
    request = scripted_request(
        list(range(prompt)), n=n, at_s=arrived, max_tokens=max_tokens, local=local
    )
    made = Group(request, request.sequences, request.prompt, [], "placed" if local else None)
    credit.promise(made, SIZE, expected_growth_tokens=8)
    return made


def credit_queue(blocks: int = 32, **step: int) -> tuple[CreditQueue, BlockPool]:
    pool = BlockPool(blocks, SIZE)
    return CreditQueue(pool, StepConfig(**step)), pool


def test_the_first_to_arrive_is_next() -> None:
    waiting, _ = credit_queue()
    assert waiting.next([], []) is None
    first, second = group(arrived=1.0), group(arrived=2.0)
    waiting.append(first)
    waiting.append(second)
    assert len(waiting) == 2 and waiting.next([], []) is first
    waiting.remove_granted(first)
    assert len(waiting) == 1 and waiting.next([], []) is second


def test_a_requeued_request_keeps_its_arrival_order() -> None:
    waiting, _ = credit_queue()
    groups = [group(arrived=float(n)) for n in range(4)]
    for each in groups:
        waiting.append(each)
    for each in groups[:3]:
        waiting.remove_granted(each)
    waiting.requeue(groups[2])
    waiting.requeue(groups[0])
    order = []
    while (following := waiting.next([], [])) is not None:
        order.append(following.arrived_s)
        waiting.remove_granted(following)
    assert order == [0.0, 2.0, 3.0]


def test_a_full_line_refuses() -> None:
    waiting, _ = credit_queue(max_queue=1)
    waiting.check_room()
    waiting.append(group())
    with pytest.raises(Overloaded, match="1 requests wait"):
        waiting.check_room()


@pytest.mark.parametrize("wanted", [{"prompt": 100}, {"max_tokens": 200}, {"n": 9}])
def test_what_the_pool_can_never_hold_is_refused_by_name(wanted: dict[str, int]) -> None:
    waiting, _ = credit_queue(blocks=16)
    with pytest.raises(InvalidRequest, match="this worker's pool has 16") as refused:
        waiting.append(group(**wanted))
    assert refused.value.field == "max_tokens" and len(waiting) == 0


def test_a_request_blocked_by_a_quarantine_blocks_no_other() -> None:
    waiting, pool = credit_queue(blocks=16)
    large, small = group(prompt=40, arrived=1.0), group(arrived=2.0)
    waiting.append(large)
    waiting.append(small)
    quarantined = pool.allocate(8, Hold.QUARANTINED)
    assert waiting.next([], []) is small
    pool.release(quarantined, Hold.QUARANTINED)
    assert waiting.next([], []) is large


def test_a_request_blocked_by_a_lasting_quarantine_is_reported() -> None:
    waiting, pool = credit_queue(blocks=16)
    large, small = group(prompt=40, arrived=1.0), group(arrived=2.0)
    waiting.append(large)
    waiting.append(small)
    assert waiting.blocked_by_quarantine(0.0) == []
    quarantined = pool.allocate(8, Hold.QUARANTINED)
    assert (
        waiting.blocked_by_quarantine(100.0) == []
        and waiting.blocked_by_quarantine(100.0 + QUARANTINE_WAIT_S - 1) == []
    )
    pool.release(quarantined, Hold.QUARANTINED)
    assert waiting.blocked_by_quarantine(100.0 + QUARANTINE_WAIT_S) == []  # it may go on
    quarantined = pool.allocate(8, Hold.QUARANTINED)
    assert waiting.blocked_by_quarantine(200.0) == []  # from the beginning
    assert waiting.blocked_by_quarantine(200.0 + QUARANTINE_WAIT_S) == [large]
    waiting.remove_granted(large)
    assert (
        waiting.blocked_by_quarantine(300.0 + QUARANTINE_WAIT_S) == []
        and waiting.next([], []) is small
    )


def test_ended_requests_are_forgotten_and_tokens_are_counted() -> None:
    waiting, _ = credit_queue()
    groups = [group(prompt=8), group(prompt=12, local=False), group(prompt=20)]
    for each in groups:
        waiting.append(each)
    assert waiting.local_tokens == 28
    groups[0].sequences[0].ended = True
    waiting.remove_ended()
    assert len(waiting) == 2 and waiting.local_tokens == 20


def test_credit_needs_blocks_and_a_place_in_the_batch() -> None:
    waiting, _ = credit_queue(blocks=16, max_sequences=2)
    wanted = group(n=2)
    assert waiting.has_credit(wanted, [], [])
    running = group()
    assert not waiting.has_credit(wanted, running.sequences, [])  # three in a batch of two
    running.sequences[0].ended = True
    assert waiting.has_credit(wanted, running.sequences, [])
    alone, holder = group(), group()
    holder.sequences[0].blocks = list(range(14))
    assert not waiting.has_credit(alone, holder.sequences, [])  # it wants four
    assert not waiting.has_credit(alone, [], [group(prompt=24)])  # half of the pool for grants


def test_a_batch_that_is_smaller_than_a_request_takes_it_alone() -> None:
    waiting, _ = credit_queue(blocks=64, max_sequences=2)
    assert waiting.has_credit(group(n=4), [], [])


def test_requests_of_few_choices_do_not_overtake_one_of_many() -> None:
    waiting, _ = credit_queue(blocks=400, max_sequences=16)  # a share of four for several choices
    single = group(arrived=0.0)
    waiting.append(single)
    waiting.remove_granted(single)
    running = group(n=2, arrived=1.0).sequences
    many, few, last = group(n=4, arrived=2.0), group(n=2, arrived=3.0), group(arrived=4.0)
    for each in (many, few):
        waiting.append(each)
    assert waiting.next(running, []) is None  # else such as `few` might come for ever
    waiting.append(last)
    assert waiting.next(running, []) is last
    running[0].ended = running[1].ended = True
    assert waiting.next(running, []) is many
