"""A link that breaks: what waits for it to come back, and what is lost."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from baton.proto import worker_pb2
from baton.runtime import metrics
from baton.runtime.links import LinkClosed
from tests.support.link_scene import LinkScene
from tests.support.metric_values import metric_value
from tests.support.router_books import leave_unsent
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually


@on_virtual_time
async def test_a_break_parks_and_a_reconnect_resumes() -> None:
    made = LinkScene(link_grace_s=20.0)
    far = await made.accept()
    made.notes.waiting = [worker_pb2.Resume(request_id="r", attempt=2)]
    await far.close()
    again = made.hello()
    again.hello.unknown_requests.append("r")
    await made.accept(again)
    assert [resume.request_id for resume in made.router_hello.resume] == ["r"]
    assert made.notes.losses == [(["r"], "the worker no longer has the request")]


@on_virtual_time
async def test_what_ends_between_hello_and_answer_is_cancelled() -> None:
    """The hello has named it, and while the link is down no router can tell the worker."""
    made = LinkScene(link_grace_s=20.0)
    far = await made.accept()
    open_choices = [worker_pb2.ChoiceIndex(choice=choice) for choice in (0, 1)]
    named = [worker_pb2.Resume(request_id=n, attempt=2, next=open_choices) for n in "abcd"]
    made.notes.waiting = named
    await far.close()
    async with asyncio.timeout(20):
        far = await made.dialer.dialled.get()
        assert len((await far.receive()).hello.resume) == 4
        later = worker_pb2.Resume(request_id="c", attempt=3)  # the named attempt has ended
        fewer = worker_pb2.Resume(request_id="d", attempt=2, next=open_choices[:1])
        made.notes.waiting = [named[1], later, fewer]
        await far.send(made.hello())
        cancelled, settled, beats = [], list[str](), 0
        while beats < 3:
            message = await far.receive()
            kind = message.WhichOneof("kind")
            beats += kind == "heartbeat"
            if kind == "cancel":
                cancelled.append((message.cancel.request_id, list(message.cancel.choices)))
            settled += message.settled.request_ids
    assert cancelled == [("a", []), ("c", []), ("d", [1])] and settled == ["a", "c"]


@on_virtual_time
async def test_messages_of_a_broken_link_are_not_sent_on_the_next() -> None:
    made = LinkScene()
    far = await made.accept()
    await far.close()
    leave_unsent(made.link, made.submit("old"))
    again = await made.accept()
    made.link.send(made.submit("new"))
    assert (await made.next(again, "submit")).request_id == "new"


@on_virtual_time
async def test_after_the_grace_everything_is_lost() -> None:
    made = LinkScene()
    far = await made.accept()
    made.index.apply(
        "decode-0",
        worker_pb2.BlockEvents(
            boot_id=made.boot_id, snapshot=True, snapshot_end=True, stored=b"i" * 16
        ),
    )
    made.dialer.reachable = False
    await far.close()
    await eventually(lambda: made.notes.losses)
    assert made.notes.losses[0][0] is None
    assert made.index.match([b"i" * 16]) == {}
    made.dialer.reachable = True
    await made.accept()


@on_virtual_time
async def test_a_link_that_breaks_at_once_is_retried_with_pauses() -> None:
    """Each time it comes up and breaks; the waits between grow nevertheless."""
    made = LinkScene(link_grace_s=60.0)
    loop = asyncio.get_running_loop()
    times = []
    for _ in range(6):
        far = await made.accept()
        times.append(loop.time())
        await far.close()
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert 0.4 < gaps[-1] < 0.81  # the fifth wait, of 0.8 s at the most and half of it


@on_virtual_time
async def test_another_boot_voids_the_old_one() -> None:
    made = LinkScene(link_grace_s=20.0)
    far = await made.accept()
    await far.close()
    await made.accept(made.hello(boot_id=b"c" * 16))
    assert made.notes.losses == [(None, "the worker was restarted")]
    assert made.link.boot_id == b"c" * 16


@on_virtual_time
async def test_a_worker_of_another_role_voids_all_and_is_not_linked() -> None:
    """It came back at the same address before the registry showed its new role."""
    made = LinkScene(link_grace_s=20.0)
    far = await made.accept()
    await far.close()
    for _ in range(2):
        async with asyncio.timeout(20):
            far = await made.dialer.dialled.get()
            await far.receive()
            await far.send(made.hello(boot_id=b"c" * 16, role="prefill"))
            with pytest.raises(LinkClosed):
                while True:
                    await far.receive()
        assert not made.link.up
        assert made.link.boot_id == made.boot_id  # so that the fleet sees another
    assert made.notes.losses[0] == (None, "the worker has taken on another role")
    await made.accept()  # as where it has its own role again
    assert made.link.up


@on_virtual_time
async def test_a_drained_worker_that_leaves_is_given_up_at_once() -> None:
    """Its requests wait for no grace: it said that it would not come back."""
    made = LinkScene(link_grace_s=60.0)
    far = await made.accept()
    await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load(draining=True)))
    await eventually(lambda: made.link.load.draining)
    breaks = metrics.LINK_BREAKS
    before = metric_value(breaks)
    made.dialer.reachable = False
    await far.close()
    async with asyncio.timeout(5):
        await eventually(lambda: made.notes.losses)
    assert made.notes.losses[0][0] is None and not made.link.parked
    assert metric_value(breaks) == before  # it is no fault of the network
