"""The dispatcher alone: what goes to another worker when its own is lost or hangs, and what not."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from baton.proto import worker_pb2
from baton.router.dispatch.active_request import ActiveRequest
from baton.runtime.errors import BatonError, Unavailable
from tests.support.dispatch_scene import DispatchScene, failed, output
from tests.support.router_books import submitter_of
from tests.support.virtual_time import on_virtual_time

PROMPT = (5, 6, 7)


async def texts(active_request: ActiveRequest) -> list[tuple[int | None, str | None]]:
    return [(each.token, each.finish) for each in await active_request.next()]


@on_virtual_time
async def test_a_loss_goes_on_with_the_accepted_tokens() -> None:
    scene = DispatchScene("decode-0", "decode-1")
    active_request = await scene.start()
    scene.give(output(0, 10), output(1, 11))
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "dead")
    await scene.settle_down()
    (submit,) = scene.link(1).submits()
    assert submit.attempt == 2 and list(submit.choices[0].accepted) == [10, 11]
    assert list(submit.prompt) == list(PROMPT) and submit.sampling.seed == 1
    scene.give(output(2, 12, attempt=1))  # the dead one's late word
    scene.give(output(2, 13, attempt=2), number=1)
    assert [each[0] for each in await texts(active_request)] == [10, 11, 13]


@on_virtual_time
async def test_requests_on_a_hung_worker_migrate_and_are_cancelled() -> None:
    scene = DispatchScene("decode-0", "decode-1")
    active_request = await scene.start()
    scene.give(output(0, 10))
    scene.dispatcher.hung(scene.link(0))
    scene.dispatcher.hung(scene.link(1))  # it has nothing yet
    await scene.settle_down()
    assert scene.link(0).cancels() == [("r", 1)]
    (submit,) = scene.link(1).submits()
    assert submit.attempt == 2 and list(submit.choices[0].accepted) == [10]
    scene.give(output(1, 11))  # the device came back: its word is of an old attempt
    scene.give(output(1, 12, attempt=2), number=1)
    assert [each[0] for each in await texts(active_request)] == [10, 12]


@on_virtual_time
async def test_parts_of_a_request_that_has_failed_are_not_placed_again() -> None:
    """All parts are lost at once, and the first to hear has no attempt left."""
    scene = DispatchScene("decode-0", max_attempts=2)
    active_request = await scene.start(choices=2)
    scene.give(output(0, 10), output(0, 11, choice=1))
    scene.dispatcher.lost(scene.link(), None, "dead")
    await scene.settle_down()
    assert len(scene.link().submits()) == 3
    scene.dispatcher.lost(scene.link(), None, "dead again")
    await asyncio.sleep(0.1)
    assert active_request.over and len(scene.dispatcher) == 0
    assert len(scene.link().submits()) == 3


@on_virtual_time
async def test_a_begun_answer_stays_with_its_numerics() -> None:
    scene = DispatchScene("decode-0", "decode-1", "decode-2")
    scene.fleet.fingerprints = {"decode-1": "other kernels"}
    active_request = await scene.start()
    scene.give(output(0, 10))
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "dead")
    await scene.settle_down()
    assert not scene.link(1).submits()  # the lower id, which would have been chosen
    assert [submit.attempt for submit in scene.link(2).submits()] == [2]
    scene.link(2).up = False
    scene.dispatcher.lost(scene.link(2), None, "dead too")
    await asyncio.sleep(scene.dispatcher.place_wait_s + 0.1)
    assert [each.token for each in await active_request.next()] == [10]
    with pytest.raises(Unavailable, match=r"as the one that began .*\(fingerprint f, KV in d\)"):
        await active_request.next()
    assert not scene.link(1).submits() and len(scene.dispatcher) == 0


@on_virtual_time
async def test_every_choice_stays_once_one_has_begun() -> None:
    scene = DispatchScene("decode-0", "decode-1", "decode-2")
    scene.fleet.fingerprints = {"decode-1": "other kernels"}
    await scene.start(choices=2)
    scene.give(output(0, 10, choice=1))
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "dead")
    await scene.settle_down()
    assert not scene.link(1).submits() and len(scene.link(2).submits()) == 2


@on_virtual_time
async def test_an_answer_that_has_not_begun_may_go_anywhere() -> None:
    scene = DispatchScene("decode-0", "decode-1", "decode-2")
    scene.fleet.fingerprints = {"decode-1": "g", "decode-2": "f"}
    await scene.start()
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "dead")
    await scene.settle_down()
    assert len(scene.link(1).submits()) == 1
    again = output(0, 10, attempt=2)
    scene.give(again, number=1)  # from here on it is an answer of the other numbers
    scene.link(1).up = False
    scene.dispatcher.lost(scene.link(1), None, "dead")
    await scene.settle_down()
    assert not scene.link(2).submits()
    await scene.dispatcher.close()


@on_virtual_time
async def test_an_end_that_was_lost_is_known_by_the_tokens() -> None:
    for last, finish in ((1, "stop"), (12, "length")):
        scene = DispatchScene()
        active_request = await scene.start(max_tokens=2)
        scene.give(output(0, 10), output(1, last))
        scene.dispatcher.lost(scene.link(), ["r"], "not held")
        assert await texts(active_request) == [(10, None), (last, None), (None, finish)]
        assert len(scene.link().submits()) == 1 and len(scene.dispatcher) == 0


@on_virtual_time
async def test_choices_that_have_begun_are_placed_one_by_one() -> None:
    scene = DispatchScene()
    await scene.start(choices=3)
    scene.give(output(0, 10, choice=1), output(0, 1, choice=2, end=worker_pb2.STOP))
    scene.dispatcher.lost(scene.link(), ["r"], "not held")
    await scene.settle_down()
    again = scene.link().submits()[1:]
    assert [(submit.request_id, submit.choices[0].choice) for submit in again] == [
        ("r.0", 0),
        ("r.1", 1),
    ]
    assert [list(submit.choices[0].accepted) for submit in again] == [[], [10]]


@on_virtual_time
async def test_choices_that_have_not_begun_stay_together() -> None:
    scene = DispatchScene()
    await scene.start(choices=3)
    scene.give(failed("LeaseLost", True))
    await scene.settle_down()
    assert scene.link().cancels() == [("r", 1)]
    again = scene.link().submits()[1]
    assert (again.request_id, again.attempt, len(again.choices)) == ("r", 2, 3)


@on_virtual_time
async def test_a_failure_during_a_migration_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even what no one has thought of: else the client would wait until its deadline."""
    scene = DispatchScene()
    active_request = await scene.start()
    scene.give(output(0, 10))

    def broken(*_: object) -> None:
        raise ValueError("what should be impossible")

    monkeypatch.setattr(submitter_of(scene.dispatcher), "try_place", broken)
    with capture_logs() as reported:
        scene.dispatcher.lost(scene.link(), None, "dead")
        await scene.settle_down()
    assert active_request.over and len(scene.dispatcher) == 0
    assert type(active_request.error) is BatonError
    assert str(active_request.error) == "the retry failed: ValueError"
    (said,) = [line for line in reported if line["log_level"] == "error"]
    assert said["request_id"] == "r" and said["event"] == "retry failed"
