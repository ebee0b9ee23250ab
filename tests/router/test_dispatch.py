"""The dispatcher alone, with links that only write down what they are sent."""

from __future__ import annotations

import asyncio

import pytest

from baton.proto import worker_pb2
from baton.router.dispatch.active_request import ActiveRequest
from baton.runtime.errors import (
    BatonError,
    Cancelled,
    EngineError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from tests.support.dispatch_scene import DispatchScene, failed, output
from tests.support.virtual_time import on_virtual_time

PROMPT = (5, 6, 7)


async def texts(active_request: ActiveRequest) -> list[tuple[int | None, str | None]]:
    return [(each.token, each.finish) for each in await active_request.next()]


@on_virtual_time
async def test_a_submission_carries_everything() -> None:
    scene = DispatchScene()
    await scene.start(choices=2, cache_salt=b"s")
    (submit,) = scene.link().submits()
    assert (submit.request_id, submit.attempt, list(submit.prompt)) == ("r", 1, list(PROMPT))
    assert [choice.choice for choice in submit.choices] == [0, 1]
    assert (submit.max_tokens, list(submit.stop_token_ids)) == (9, [1])
    assert submit.cache_salt == b"s" and submit.placement.local and submit.deadline_ms > 0
    assert scene.link().placed_requests == 1


@on_virtual_time
async def test_only_the_next_index_of_the_current_attempt_counts() -> None:
    scene = DispatchScene("decode-0", "decode-1")
    active_request = await scene.start()
    scene.give(output(0, 10), output(0, 11), output(1, 12, attempt=2), output(1, 13, choice=5))
    scene.give(output(1, 14, request_id="other"))
    scene.give(output(1, 15), number=1)  # another worker's word for it
    scene.give(output(1, 16))
    assert [each[0] for each in await texts(active_request)] == [10, 16]


@on_virtual_time
async def test_the_end_comes_once() -> None:
    scene = DispatchScene()
    active_request = await scene.start()
    scene.give(output(0, 10), output(1, 1, end=worker_pb2.STOP), output(2, 12))
    assert await texts(active_request) == [(10, None), (1, "stop")]
    assert await texts(active_request) == [] and active_request.error is None
    assert len(scene.dispatcher) == 0
    assert scene.link().settled == ["r"] and not scene.link().cancels()


@on_virtual_time
async def test_late_ends_of_unknown_requests_are_settled() -> None:
    scene = DispatchScene()
    scene.give(output(3, None, end=worker_pb2.CANCELLED, request_id="gone"))
    assert scene.link().settled == ["gone"]


@on_virtual_time
async def test_cancel_is_sent_in_the_same_tick() -> None:
    scene = DispatchScene()
    active_request = await scene.start()
    scene.dispatcher.cancel(active_request)
    assert scene.link().cancels() == [("r", 1)]
    scene.give(output(0))
    with pytest.raises(Cancelled):
        await active_request.next()


@on_virtual_time
async def test_a_resume_names_open_choices_and_their_next_index() -> None:
    scene = DispatchScene()
    active_request = await scene.start(choices=3)
    scene.give(output(0, 10, choice=1), output(0, 1, choice=2, end=worker_pb2.STOP))
    scene.dispatcher.finish_choice(active_request, 0)
    (resume,) = scene.dispatcher.pending(scene.link())
    assert (resume.request_id, resume.attempt) == ("r", 1)
    assert [(entry.choice, entry.index) for entry in resume.next] == [(1, 1)]


@on_virtual_time
async def test_a_stop_string_cancels_a_choice_and_the_last_the_request() -> None:
    scene = DispatchScene()
    active_request = await scene.start(choices=2)
    scene.dispatcher.finish_choice(active_request, 1)
    (cancel,) = [m.cancel for m in scene.link().sent if m.WhichOneof("kind") == "cancel"]
    assert (cancel.request_id, cancel.attempt, list(cancel.choices)) == ("r", 1, [1])
    assert not scene.link().settled and not active_request.over
    scene.give(output(0, None, choice=1, end=worker_pb2.CANCELLED))  # as it was asked
    scene.give(output(0, 10, choice=1), output(0, 11, choice=0))
    assert [each[0] for each in await texts(active_request)] == [11]
    scene.dispatcher.finish_choice(active_request, 0)
    assert scene.link().cancels() == [("r", 1)] * 2 and active_request.over
    assert scene.link().sent[-1].cancel.choices == [0] and scene.link().settled == ["r"]
    assert active_request.error is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("EngineError", EngineError),
        ("InvalidRequest", InvalidRequest),
        ("NoSuchClass", BatonError),
    ],
)
@on_virtual_time
async def test_a_final_failure_ends_the_request(code: str, kind: type[BatonError]) -> None:
    scene = DispatchScene("decode-0", "decode-1")
    active_request = await scene.start()
    scene.give(failed(code, False))
    with pytest.raises(kind):
        await active_request.next()
    assert not scene.link(1).submits() and len(scene.dispatcher) == 0


@on_virtual_time
async def test_attempts_end() -> None:
    scene = DispatchScene()
    active_request = await scene.start()
    for attempt in (1, 2, 3):
        scene.give(failed("LeaseLost", True, attempt=attempt))
        await scene.settle_down()
    with pytest.raises(BatonError):
        await active_request.next()
    assert [submit.attempt for submit in scene.link().submits()] == [1, 2, 3]


@on_virtual_time
async def test_a_worker_that_gives_up_is_left() -> None:
    scene = DispatchScene("decode-0", "decode-1")
    await scene.start()
    scene.give(output(0, None, end=worker_pb2.CANCELLED))
    await scene.settle_down()
    assert [submit.attempt for submit in scene.link(1).submits()] == [2]


@on_virtual_time
async def test_refusals_before_any_worker_hears() -> None:
    scene = DispatchScene()
    scene.fleet.waiting = 10_000
    with pytest.raises(Overloaded):
        await scene.start()
    scene.fleet.waiting, scene.fleet.total_blocks = 0, 0
    with pytest.raises(InvalidRequest):
        await scene.start()
    scene.link().up = False
    with pytest.raises(Unavailable):
        await scene.start()
    assert not scene.link().sent and len(scene.dispatcher) == 0


@on_virtual_time
async def test_a_worker_that_appears_in_time_is_used() -> None:
    scene = DispatchScene()
    scene.dispatcher.place_wait_s = 20
    scene.link().up = False
    starting = asyncio.create_task(scene.start())
    await scene.settle_down()
    scene.link().up = True
    await starting
    assert len(scene.link().submits()) == 1


@on_virtual_time
async def test_cancelling_a_request_before_placement_leaves_nothing() -> None:
    scene = DispatchScene()
    scene.dispatcher.place_wait_s = 20
    active_request = await scene.start()
    scene.link().up = False
    scene.dispatcher.lost(scene.link(), None, "dead")
    await scene.settle_down()
    scene.dispatcher.cancel(active_request)
    scene.link().up = True
    await scene.settle_down()
    await scene.dispatcher.close()
    assert len(scene.link().submits()) == 1 and len(scene.dispatcher) == 0


@on_virtual_time
async def test_a_stopping_router_ends_requests_that_await_a_worker() -> None:
    scene = DispatchScene()
    scene.link().up = False
    waiting = asyncio.create_task(scene.start())
    await asyncio.sleep(0.02)
    scene.dispatcher.end_all()
    for starting in (waiting, asyncio.create_task(scene.start())):
        with pytest.raises(Unavailable, match="stops"):
            await asyncio.wait_for(starting, 2)
    assert len(scene.dispatcher) == 0


@on_virtual_time
async def test_close_ends_everything() -> None:
    scene = DispatchScene()
    active_request = await scene.start()
    await scene.dispatcher.close()
    with pytest.raises(Unavailable, match="stops"):
        await active_request.next()


@on_virtual_time
async def test_a_request_due_to_miss_its_deadline_is_refused_at_once() -> None:
    scene = DispatchScene()
    scene.fleet.expected = 10.0
    with pytest.raises(Overloaded, match=r"would take 10\.0 s") as refused:
        await scene.start(within_s=10)
    assert 1.9 < refused.value.retry_after_s < 2.1 and not scene.link().sent
    active_request = await scene.start(within_s=13)
    scene.fleet.expected = 100.0
    scene.give(failed("LeaseLost", True))  # one under way is not refused for it
    await scene.settle_down()
    assert len(scene.link().submits()) == 2
    scene.dispatcher.cancel(active_request)


@pytest.mark.parametrize("top", [False, True])
@on_virtual_time
async def test_an_unknown_token_is_a_failure_of_its_worker(top: bool) -> None:
    scene = DispatchScene("decode-0", "decode-1")
    scene.fleet.vocab_size = 50
    active_request = await scene.start()
    scene.give(output(0, 49, cached_tokens=99))
    assert active_request.cached_tokens == len(PROMPT)  # no more than there are
    wrong = output(1, 9 if top else 50)
    if top:
        wrong.top.add(token=50, logprob=-1.0)
    scene.give(wrong)
    await scene.settle_down()
    (again,) = scene.link(1).submits()
    assert (again.attempt, list(again.choices[0].accepted)) == (2, [49])
    assert await texts(active_request) == [(49, None)]
    scene.dispatcher.cancel(active_request)
