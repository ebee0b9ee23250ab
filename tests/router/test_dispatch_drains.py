"""What draining workers hand back: it goes on elsewhere, and no worker has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from baton.router.dispatch.active_request import ActiveRequest
from baton.runtime.errors import DeadlineExceeded, EngineError, Unavailable
from tests.support.dispatch_scene import DispatchScene, failed, output
from tests.support.virtual_time import on_virtual_time

Drained = Callable[..., Awaitable[tuple[DispatchScene, ActiveRequest]]]


@on_virtual_time
async def test_requests_returned_by_a_drain_go_on_without_a_failure() -> None:
    scene = DispatchScene("decode-0", "decode-1")
    active_request = await scene.start()
    scene.give(output(0, 10))
    scene.give(failed("Draining", True))
    await scene.settle_down()
    (again,) = scene.link(1).submits()
    assert (again.attempt, list(again.choices[0].accepted)) == (2, [10])
    scene.link(0).load.draining = False  # it has been started again
    for attempt in range(2, 8):  # far more than max_attempts
        here = (attempt + 1) % 2
        scene.give(failed("Draining", True, attempt=attempt), number=here)
        scene.link(1 - here).load.draining = False
        await scene.settle_down()
        assert scene.link(1 - here).submits()[-1].attempt == attempt + 1
    assert not active_request.over
    for attempt in (8, 9):  # but failures do, as ever
        assert not active_request.over
        here = 0 if scene.link(0).submits()[-1].attempt == attempt else 1
        scene.link(0).load.draining = scene.link(1).load.draining = False
        scene.give(failed("EngineError", True, attempt=attempt), number=here)
        await scene.settle_down()
    here = 0 if scene.link(0).submits()[-1].attempt == 10 else 1
    scene.give(failed("EngineError", True, attempt=10), number=here)
    assert active_request.over and isinstance(active_request.error, EngineError)


@on_virtual_time
async def test_a_worker_that_refuses_as_draining_gets_nothing_more() -> None:
    """Its load may say so only later: nothing may be placed there in between."""
    scene = DispatchScene("decode-0", "decode-1")
    await scene.start()
    scene.give(failed("Draining", True))
    await scene.settle_down()
    await scene.start("second")
    assert len(scene.link(0).submits()) == 1 and len(scene.link(1).submits()) == 2


@on_virtual_time
async def test_requests_on_a_link_lost_in_a_drain_are_no_failures() -> None:
    scene = DispatchScene("decode-0", "decode-1")
    active_request = await scene.start()
    scene.link(0).load.draining = True
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "it left")
    await scene.settle_down()
    (attempt,) = scene.dispatcher.attempts.values()
    assert (attempt.attempt, attempt.drains, attempt.failures) == (2, 1, 1)
    assert not active_request.over


@pytest.fixture(name="drained_alone")
def drained_alone_fixture() -> Drained:
    """The only decode worker hands back what has begun there, and ends."""

    async def drained(
        returned_wait_s: float, within_s: float = 3600
    ) -> tuple[DispatchScene, ActiveRequest]:
        scene = DispatchScene(returned_wait_s=returned_wait_s)
        active_request = await scene.start(within_s=within_s)
        scene.give(output(0, 10))
        scene.give(failed("Draining", True))
        scene.link().up = False
        await scene.settle_down()
        return scene, active_request

    return drained


@on_virtual_time
async def test_requests_returned_by_the_only_worker_wait_for_it(
    drained_alone: Drained,
) -> None:
    scene, active_request = await drained_alone(30.0)
    await asyncio.sleep(2 * scene.dispatcher.place_wait_s)  # a start takes longer than that
    assert not active_request.over and len(scene.link().submits()) == 1
    scene.link().up, scene.link().load.draining = True, False
    async with asyncio.timeout(5):
        while len(scene.link().submits()) < 2:
            await asyncio.sleep(0.01)
    again = scene.link().submits()[-1]
    assert (again.attempt, list(again.choices[0].accepted)) == (2, [10])


@on_virtual_time
async def test_what_was_handed_back_waits_for_its_bound_and_names_it(
    drained_alone: Drained,
) -> None:
    scene, active_request = await drained_alone(0.3)
    assert [each.token for each in await active_request.next()] == [10]
    with pytest.raises(Unavailable, match=r"returned the request, and in 0\.3 s no other could"):
        await asyncio.wait_for(active_request.next(), 5)
    assert len(scene.dispatcher) == 0


@on_virtual_time
async def test_what_was_handed_back_waits_no_longer_than_its_deadline(
    drained_alone: Drained,
) -> None:
    scene, active_request = await drained_alone(30.0, within_s=0.3)
    assert [each.token for each in await active_request.next()] == [10]
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(active_request.next(), 5)
    assert len(scene.dispatcher) == 0


@on_virtual_time
async def test_a_placement_is_repeated_without_departed_candidates() -> None:
    """The decode worker that says so keeps the router's trust, and may have the request again."""
    scene = DispatchScene("decode-0", "prefill-0", "prefill-1", placement="disaggregated")
    links = scene.fleet.links
    links["prefill-1"].up = False
    active_request = await scene.start()
    links["prefill-0"].up, links["prefill-1"].up = False, True
    scene.give(failed("StalePlacement", True))
    await scene.settle_down()
    asked = [[each.worker_id for each in s.placement.candidates] for s in scene.link().submits()]
    assert asked == [["prefill-0"], ["prefill-1"]]
    assert not scene.link().load.draining
    (attempt,) = scene.dispatcher.attempts.values()
    assert (attempt.attempt, attempt.failures) == (2, 1)
    assert links["decode-0"].boot_id not in attempt.avoid
    scene.give(failed("StalePlacement", True, attempt=2))
    links["prefill-0"].up = True  # whom the decode worker did not find either
    await scene.settle_down()
    last = scene.link().submits()[-1]
    assert (last.attempt, last.placement.local, len(last.placement.candidates)) == (3, True, 0)
    assert not active_request.over
