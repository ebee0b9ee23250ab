"""A worker's link over memory links: what is said in which order, and what is taken."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

from baton.proto import worker_pb2
from baton.runtime.errors import Overloaded
from baton.runtime.links import MEMORY_LINK_MESSAGES, LinkClosed
from tests.support.link_scene import HELLO, FarEnd, LinkScene
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually


@on_virtual_time
async def test_nothing_is_sent_before_the_handshake() -> None:
    made = LinkScene()
    with pytest.raises(LinkClosed):
        made.link.send(made.submit("r"))
    far = await made.accept()
    assert made.router_hello.router_id == (b"r" * 16).hex()
    made.link.send(made.submit("r"))
    assert (await made.next(far, "submit")).request_id == "r"


@on_virtual_time
async def test_outputs_and_load_are_passed_on() -> None:
    made = LinkScene()
    far = await made.accept()
    assert made.link.load.free_blocks == 10  # until the worker says more
    made.link.placed_tokens = 99
    await far.send(worker_pb2.WorkerMessage(outputs=worker_pb2.StepOutputs()))
    await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load(free_blocks=3)))
    await eventually(lambda: made.link.load.free_blocks == 3 and made.notes.outputs)
    assert made.link.placed_tokens == 0


@on_virtual_time
@pytest.mark.parametrize("crowded", [True, False])
async def test_clients_have_a_turn_once_their_buffers_are_full(
    crowded: bool,
) -> None:
    made = LinkScene()
    far = await made.accept()
    made.notes.crowded = crowded
    for _ in range(9):
        await far.send(worker_pb2.WorkerMessage(outputs=worker_pb2.StepOutputs()))
    seen = set()
    async with asyncio.timeout(20):
        while len(made.notes.outputs) < 9:
            await asyncio.sleep(0)
            seen.add(len(made.notes.outputs))
    assert (seen >= set(range(1, 10))) is crowded


@on_virtual_time
async def test_heartbeats_go_down_without_traffic() -> None:
    made = LinkScene()
    far = await made.accept()
    for _ in range(3):
        await made.next(far, "heartbeat")


@on_virtual_time
async def test_settled_goes_before_a_later_submit() -> None:
    made = LinkScene()
    far = await made.accept()
    made.link.settle("r")
    made.link.send(made.submit("r"))
    kinds: list[str] = []
    async with asyncio.timeout(20):
        while "submit" not in kinds:
            kinds.append((await far.receive()).WhichOneof("kind"))
    assert "settled" in kinds and kinds.index("settled") < kinds.index("submit")


@on_virtual_time
async def test_settled_goes_with_a_heartbeat_at_the_latest() -> None:
    made = LinkScene()
    far = await made.accept()
    made.link.settle("a")
    assert list((await made.next(far, "settled")).request_ids) == ["a"]


@on_virtual_time
async def test_a_heartbeat_carries_the_last_accepted_of_each_choice() -> None:
    made = LinkScene()
    far = await made.accept()
    for name, attempt in (("a", 1), ("b", 1), ("a", 2)):
        made.link.confirm(worker_pb2.Resume(request_id=name, attempt=attempt))
    settled = await made.next(far, "settled")
    assert not settled.request_ids
    assert [(e.request_id, e.attempt) for e in settled.accepted] == [("a", 2), ("b", 1)]


@on_virtual_time
async def test_a_worker_that_never_answers_hello_is_given_up() -> None:
    made = LinkScene(link_silence_s=0.1)
    async with asyncio.timeout(20):
        first = await made.dialer.dialled.get()
        second = await made.dialer.dialled.get()
    assert first is not second and not made.link.up


@on_virtual_time
async def test_a_worker_that_answers_hello_late_is_linked_at_last() -> None:
    """As on a busy host: each handshake takes longer than the silence that ends a link."""
    made, clock = LinkScene(link_silence_s=2.0), asyncio.get_running_loop().time

    async def answer(far: FarEnd) -> None:
        await asyncio.sleep(5.0)
        with contextlib.suppress(LinkClosed):  # of a handshake that was too short
            await far.send(HELLO)

    begun_s, answering = clock(), []
    async with asyncio.timeout(20):
        while not made.link.up:
            if not made.dialer.dialled.empty():
                answering.append(asyncio.create_task(answer(made.dialer.dialled.get_nowait())))
            await asyncio.sleep(0.01)
    assert len(answering) == 3 and 11.0 < clock() - begun_s < 12.0  # 2, 4, and 5 of 8 s


@on_virtual_time
async def test_a_worker_that_cannot_be_linked_is_logged_once() -> None:
    with capture_logs() as logs:
        made = LinkScene()
        made.dialer.reachable = False
        await asyncio.sleep(20)
        (said,) = logs
        assert (said["event"], said["log_level"]) == ("worker not linked", "warning")
        assert (said["worker_id"], said["address"]) == ("decode-0", "h:1")
        assert said["reason"] == "unreachable"
        made.dialer.reachable = True
        far = await made.accept()
        made.dialer.reachable = False
        await far.close()
        await asyncio.sleep(20)
    events = [each["event"] for each in logs]
    assert events == ["worker not linked", "worker linked", "link lost", "worker not linked"]


@on_virtual_time
async def test_a_drained_worker_is_not_logged_as_not_linked() -> None:
    made = LinkScene()
    far = await made.accept()
    await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load(draining=True)))
    await eventually(lambda: made.link.load.draining)
    with capture_logs() as logs:
        made.dialer.reachable = False
        await far.close()
        await asyncio.sleep(20)
    assert [each["event"] for each in logs] == ["drained worker disconnected"]


@on_virtual_time
async def test_another_first_message_is_refused() -> None:
    made = LinkScene()
    async with asyncio.timeout(20):
        far = await made.dialer.dialled.get()
        await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load()))
        await made.dialer.dialled.get()
    assert not made.link.up


@on_virtual_time
async def test_another_worker_at_the_address_is_not_taken_for_this_one() -> None:
    """Nor does it take this router's link of its own for one that came back."""
    made = LinkScene()
    far = await made.accept()
    mine = made.router_hello.boot_id
    await far.close()
    async with asyncio.timeout(20):
        far = await made.dialer.dialled.get()
        assert (await far.receive()).hello.boot_id == mine  # it is the same link
        await far.send(made.hello(worker_id="decode-1"))
        await made.dialer.dialled.get()
    assert not made.link.up
    assert made.notes.losses == [(None, "another worker is at its address")]
    other = LinkScene(worker_id="decode-1")
    await other.accept(other.hello(worker_id="decode-1"))
    assert (
        other.router_hello.router_id == made.router_hello.router_id
        and other.router_hello.boot_id != mine
    )


@on_virtual_time
async def test_block_events_of_another_boot_are_not_taken() -> None:
    made = LinkScene()
    await made.accept()

    def snapshot(boot: bytes) -> worker_pb2.BlockEvents:
        return worker_pb2.BlockEvents(
            boot_id=boot, snapshot=True, snapshot_end=True, stored=b"i" * 16
        )

    made.dialer.blocks.put_nowait(snapshot(b"c" * 16))
    made.dialer.blocks.put_nowait(snapshot(made.boot_id))
    await eventually(lambda: made.index.match([b"i" * 16]) == {"decode-0": 1})
    assert made.link.up  # the link does not suffer from it


@on_virtual_time
async def test_a_worker_that_does_not_read_is_noticed() -> None:
    made = LinkScene(link_queue=4)
    await made.accept()
    with pytest.raises(Overloaded):
        for _ in range(5):  # within one tick: nothing is written in between
            made.link.send(made.submit("r"))


@on_virtual_time
async def test_queued_cancels_are_sent_when_the_router_stops() -> None:
    made = LinkScene()
    made.dialer.write_s = 0.01
    far = await made.accept()
    names = [f"req-{number}" for number in range(5)]
    for name in names:
        cancel = worker_pb2.Cancel(request_id=name)
        made.link.send(worker_pb2.RouterMessage(cancel=cancel))
    made.task.cancel()  # in the tick of the cancels
    await asyncio.gather(made.task, return_exceptions=True)
    assert [(await made.next(far, "cancel")).request_id for _ in names] == names


@on_virtual_time
async def test_a_worker_that_does_not_read_delays_no_stop() -> None:
    made = LinkScene(link_queue=100_000)
    await made.accept()
    for _ in range(MEMORY_LINK_MESSAGES + 1):
        made.link.send(made.submit("r"))
    started_s = asyncio.get_running_loop().time()
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    assert asyncio.get_running_loop().time() - started_s < 1.0  # on the simulated clock


@on_virtual_time
async def test_the_end_is_reported_to_the_listener() -> None:
    made = LinkScene()
    await made.accept()
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    assert made.notes.losses == [(None, "the router dropped the worker")]
    assert not made.link.up


@on_virtual_time
async def test_a_heartbeat_says_what_no_worker_has() -> None:
    made = LinkScene()
    far = await made.accept()
    made.unplaced.waiting, made.unplaced.refused = 3, 5
    await made.next(far, "heartbeat")  # may have been sent before
    reported = (await made.next(far, "heartbeat")).unplaced
    assert (reported.waiting, reported.refused) == (3, 5)
