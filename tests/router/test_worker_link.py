"""A worker's link over memory links: what is said in which order, and what a loss does."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest

from baton.proto import worker_pb2
from baton.router.radix_index import RadixIndex
from baton.router.worker_link import WorkerLink
from baton.runtime import metrics
from baton.runtime.config import RouterConfig
from baton.runtime.errors import Overloaded
from baton.runtime.links import LinkClosed, memory_link
from baton.runtime.registry import WorkerRecord
from baton.runtime.wire import ModelLimits

BOOT = b"b" * 16
CONFIG = RouterConfig(link_heartbeat_s=0.02, link_silence_s=5.0, link_grace_s=0.3)
LIMITS = ModelLimits(300, 40, "f", "d", b"key")
WELCOME = worker_pb2.WorkerMessage(welcome=LIMITS.welcome("decode-0", BOOT, "decode", 4, 10))


class MemoryDialer:
    """Each dialled link's far end comes out of `dialled`; block events are put in `blocks`."""

    def __init__(self) -> None:
        self.dialled: asyncio.Queue[Any] = asyncio.Queue(100)
        self.blocks: asyncio.Queue[worker_pb2.BlockEvents] = asyncio.Queue(100)
        self.reachable = True

    def connect(self, address: str) -> MemoryConnection:
        return MemoryConnection(self)


class MemoryConnection:
    def __init__(self, dialer: MemoryDialer) -> None:
        self._dialer = dialer

    def link(self) -> Any:
        if not self._dialer.reachable:
            raise LinkClosed("unreachable")
        ends: tuple[Any, Any] = memory_link()
        near, far = ends
        self._dialer.dialled.put_nowait(far)
        return near

    async def watch_blocks(self) -> AsyncIterator[worker_pb2.BlockEvents]:
        while True:
            yield await self._dialer.blocks.get()

    async def close(self) -> None:
        pass


class Notes:
    """A Bearer that writes down what it is told."""

    def __init__(self) -> None:
        self.outputs: list[worker_pb2.StepOutputs] = []
        self.losses: list[tuple[list[str] | None, str]] = []
        self.waiting: list[worker_pb2.Resume] = []
        self.hangs = 0

    def take(self, link: WorkerLink, outputs: worker_pb2.StepOutputs) -> None:
        self.outputs.append(outputs)

    def pending(self, link: WorkerLink) -> list[worker_pb2.Resume]:
        return self.waiting

    def lost(self, link: WorkerLink, request_ids: Iterable[str] | None, reason: str) -> None:
        self.losses.append((None if request_ids is None else list(request_ids), reason))

    def hung(self, link: WorkerLink) -> None:
        self.hangs += 1


class Scene:
    def __init__(self, config: RouterConfig = CONFIG) -> None:
        self.dialer, self.notes, self.index = MemoryDialer(), Notes(), RadixIndex()
        record = WorkerRecord("decode-0", BOOT.hex(), "decode", "h:1", "", "m", 1)
        self.link = WorkerLink(
            record, self.dialer, self.index, self.notes, config, b"r" * 16, vocab_size=300
        )
        self.task = asyncio.create_task(self.link.run())

    async def accept(self, welcome: worker_pb2.WorkerMessage = WELCOME) -> Any:
        """The far end of the next link, after its hello was answered."""
        async with asyncio.timeout(20):
            far = await self.dialer.dialled.get()
            first = await far.receive()
            assert first.WhichOneof("kind") == "hello"
            self.hello = first.hello
            await far.send(welcome)
            while not self.link.up:
                await asyncio.sleep(0.005)
        return far

    async def next(self, far: Any, kind: str) -> Any:
        async with asyncio.timeout(20):
            while True:
                message = await far.receive()
                if message.WhichOneof("kind") == kind:
                    return getattr(message, kind)


@pytest.fixture
async def scene() -> AsyncIterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(config: RouterConfig = CONFIG) -> Scene:
        made.append(Scene(config))
        return made[-1]

    yield make
    for each in made:
        each.task.cancel()
        await asyncio.gather(each.task, return_exceptions=True)


def submit(request_id: str) -> worker_pb2.RouterMessage:
    return worker_pb2.RouterMessage(submit=worker_pb2.Submit(request_id=request_id))


async def test_nothing_is_sent_before_the_welcome(scene: Any) -> None:
    made = scene()
    with pytest.raises(LinkClosed):
        made.link.send(submit("r"))
    far = await made.accept()
    assert made.hello.boot_id == b"r" * 16
    made.link.send(submit("r"))
    assert (await made.next(far, "submit")).request_id == "r"


async def test_outputs_and_load_are_passed_on(scene: Any, eventually: Any) -> None:
    made = scene()
    far = await made.accept()
    assert made.link.load.free_blocks == 10  # until the worker says more
    made.link.placed_tokens = 99
    await far.send(worker_pb2.WorkerMessage(outputs=worker_pb2.StepOutputs()))
    await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load(free_blocks=3)))
    await eventually(lambda: made.link.load.free_blocks == 3 and made.notes.outputs)
    assert made.link.placed_tokens == 0


async def test_heartbeats_go_down_without_traffic(scene: Any) -> None:
    made = scene()
    far = await made.accept()
    for _ in range(3):
        await made.next(far, "heartbeat")


async def test_settled_goes_before_a_later_submit(scene: Any) -> None:
    made = scene()
    far = await made.accept()
    made.link.settle("r")
    made.link.send(submit("r"))
    kinds: list[str] = []
    async with asyncio.timeout(20):
        while "submit" not in kinds:
            kinds.append((await far.receive()).WhichOneof("kind"))
    assert "settled" in kinds and kinds.index("settled") < kinds.index("submit")


async def test_settled_goes_with_a_heartbeat_at_the_latest(scene: Any) -> None:
    made = scene()
    far = await made.accept()
    made.link.settle("a")
    assert list((await made.next(far, "settled")).request_ids) == ["a"]


async def test_what_was_accepted_goes_with_a_heartbeat_the_last_word_of_each(scene: Any) -> None:
    made = scene()
    far = await made.accept()
    for name, attempt in (("a", 1), ("b", 1), ("a", 2)):
        made.link.confirm(worker_pb2.Resume(request_id=name, attempt=attempt))
    settled = await made.next(far, "settled")
    assert not settled.request_ids
    assert [(e.request_id, e.attempt) for e in settled.accepted] == [("a", 2), ("b", 1)]


async def test_a_break_parks_and_a_reconnect_resumes(scene: Any) -> None:
    made = scene(RouterConfig(link_heartbeat_s=0.02, link_silence_s=5.0, link_grace_s=20.0))
    far = await made.accept()
    made.notes.waiting = [worker_pb2.Resume(request_id="r", attempt=2)]
    await far.close()
    again = worker_pb2.WorkerMessage()
    again.CopyFrom(WELCOME)
    again.welcome.lost.append("r")
    await made.accept(again)
    assert [resume.request_id for resume in made.hello.resume] == ["r"]
    assert made.notes.losses == [(["r"], "the worker does not hold it any more")]


async def test_what_ends_between_hello_and_welcome_is_cancelled(scene: Any) -> None:
    """The hello has named it, and while the link is down nobody can tell the worker."""
    made = scene(RouterConfig(link_heartbeat_s=0.02, link_silence_s=5.0, link_grace_s=20.0))
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
        await far.send(WELCOME)
        cancelled, settled, beats = [], [], 0
        while beats < 3:
            message = await far.receive()
            kind = message.WhichOneof("kind")
            beats += kind == "heartbeat"
            if kind == "cancel":
                cancelled.append((message.cancel.request_id, list(message.cancel.choices)))
            settled += message.settled.request_ids
    assert cancelled == [("a", []), ("c", []), ("d", [1])] and settled == ["a", "c"]


async def test_messages_of_a_broken_link_are_not_sent_on_the_next(scene: Any) -> None:
    made = scene()
    far = await made.accept()
    await far.close()
    made.link._outbox.put_nowait(submit("old"))
    again = await made.accept()
    made.link.send(submit("new"))
    assert (await made.next(again, "submit")).request_id == "new"


async def test_after_the_grace_everything_is_lost(scene: Any, eventually: Any) -> None:
    made = scene()
    far = await made.accept()
    made.index.apply(
        "decode-0",
        worker_pb2.BlockEvents(boot_id=BOOT, snapshot=True, snapshot_end=True, stored=b"i" * 16),
    )
    made.dialer.reachable = False
    await far.close()
    await eventually(lambda: made.notes.losses)
    assert made.notes.losses[0][0] is None
    assert made.index.match([b"i" * 16]) == {}
    made.dialer.reachable = True
    await made.accept()


async def test_a_link_that_breaks_at_once_is_not_tried_at_once_for_ever(scene: Any) -> None:
    """Each time it comes up and breaks; the waits between grow nevertheless."""
    made = scene(RouterConfig(link_heartbeat_s=0.02, link_silence_s=5.0, link_grace_s=60.0))
    loop = asyncio.get_running_loop()
    times = []
    for _ in range(6):
        far = await made.accept()
        times.append(loop.time())
        await far.close()
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps[-1] > 0.35  # at least half of 0.8 s


async def test_a_hang_is_told_once_and_ends(scene: Any, eventually: Any) -> None:
    made = scene()
    far = await made.accept()
    for overdue_ms, hung, told in ((1999, False, 0), (2000, True, 1), (2600, True, 1)):
        load = worker_pb2.Load(overdue_ms=overdue_ms)
        await far.send(worker_pb2.WorkerMessage(load=load))
        await eventually(lambda wanted=overdue_ms: made.link.load.overdue_ms == wanted)
        assert (made.link.hung, made.link.takes_work, made.notes.hangs) == (hung, not hung, told)
    await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load()))
    await eventually(lambda: made.link.takes_work)
    assert made.link.up and made.notes.losses == []


async def test_after_a_silence_there_is_no_grace(scene: Any, eventually: Any) -> None:
    made = scene(RouterConfig(link_heartbeat_s=0.1, link_silence_s=0.15, link_grace_s=60.0))
    await made.accept()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await eventually(lambda: made.notes.losses)
    assert made.notes.losses[0] == (None, "decode-0 has been silent too long")
    assert loop.time() - began_s < 5.0 and not made.link.up


async def test_silence_is_a_break(scene: Any, eventually: Any) -> None:
    made = scene(RouterConfig(link_heartbeat_s=0.02, link_silence_s=0.2, link_grace_s=0.05))
    await made.accept()
    await eventually(lambda: made.notes.losses)


async def test_a_stall_of_this_process_is_no_silence_of_the_worker(scene: Any) -> None:
    made = scene(RouterConfig(link_heartbeat_s=0.05, link_silence_s=0.5, link_grace_s=60.0))
    far = await made.accept()
    await made.next(far, "heartbeat")
    time.sleep(0.8)  # noqa: ASYNC251  nobody in this process can speak, nor hear
    for _ in range(8):
        await asyncio.sleep(0.05)
        await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load(free_blocks=3)))
    assert made.link.up and made.link.load.free_blocks == 3 and not made.notes.losses


def load() -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(load=worker_pb2.Load(free_blocks=3))


async def test_a_quiet_worker_takes_nothing_new_and_keeps_its_link(
    scene: Any, eventually: Any
) -> None:
    made = scene(RouterConfig(link_heartbeat_s=0.05, link_silence_s=1.0, link_grace_s=60.0))
    far = await made.accept()
    assert made.link.takes_work
    began_s = asyncio.get_running_loop().time()
    await eventually(lambda: not made.link.takes_work)
    assert 0.59 <= asyncio.get_running_loop().time() - began_s < 0.9
    assert made.link.up and made.notes.losses == []
    await far.send(load())
    await eventually(lambda: made.link.takes_work)
    await eventually(lambda: made.notes.losses)  # now it is silent for as long as that takes
    assert asyncio.get_running_loop().time() - began_s > 1.5


async def test_one_heartbeat_that_is_late_makes_nobody_quiet(scene: Any) -> None:
    made = scene(RouterConfig(link_heartbeat_s=0.4, link_silence_s=1.0, link_grace_s=60.0))
    far = await made.accept()
    for _ in range(2):
        await asyncio.sleep(0.65)  # more than the share, less than two heartbeats
        assert made.link.takes_work
        await far.send(load())
        await asyncio.sleep(0.01)


async def test_a_stall_of_this_process_makes_nobody_quiet(scene: Any) -> None:
    made = scene(RouterConfig(link_heartbeat_s=0.05, link_silence_s=1.0, link_grace_s=60.0))
    far = await made.accept()
    await made.next(far, "heartbeat")
    time.sleep(0.8)  # noqa: ASYNC251  nobody in this process can speak, nor hear
    for _ in range(8):
        assert made.link.takes_work
        await asyncio.sleep(0.05)
        await far.send(load())


async def test_a_worker_that_never_welcomes_is_given_up(scene: Any) -> None:
    made = scene(RouterConfig(link_heartbeat_s=0.02, link_silence_s=0.1))
    async with asyncio.timeout(20):
        first = await made.dialer.dialled.get()
        second = await made.dialer.dialled.get()
    assert first is not second and not made.link.up


async def test_another_first_message_is_refused(scene: Any) -> None:
    made = scene()
    async with asyncio.timeout(20):
        far = await made.dialer.dialled.get()
        await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load()))
        await made.dialer.dialled.get()
    assert not made.link.up


async def test_another_boot_voids_the_old_one(scene: Any) -> None:
    made = scene(RouterConfig(link_heartbeat_s=0.02, link_silence_s=5.0, link_grace_s=20.0))
    far = await made.accept()
    await far.close()
    other = worker_pb2.WorkerMessage()
    other.CopyFrom(WELCOME)
    other.welcome.boot_id = b"c" * 16
    await made.accept(other)
    assert made.notes.losses == [(None, "the worker was started anew")]
    assert made.link.boot_id == b"c" * 16


async def test_a_worker_of_another_role_voids_all_and_is_not_linked(scene: Any) -> None:
    """It came back at the same address before the registry told of its new role."""
    made = scene(RouterConfig(link_heartbeat_s=0.02, link_silence_s=5.0, link_grace_s=20.0))
    far = await made.accept()
    await far.close()
    other = worker_pb2.WorkerMessage()
    other.CopyFrom(WELCOME)
    other.welcome.boot_id, other.welcome.role = b"c" * 16, "prefill"
    for _ in range(2):
        async with asyncio.timeout(20):
            far = await made.dialer.dialled.get()
            await far.receive()
            await far.send(other)
            with pytest.raises(LinkClosed):
                while True:
                    await far.receive()
        assert not made.link.up and made.link.boot_id == BOOT  # so that the fleet sees another
    assert made.notes.losses[0] == (None, "the worker has taken on another role")
    await made.accept()  # as where it has its own role again
    assert made.link.up


async def test_block_events_of_another_boot_are_not_taken(scene: Any, eventually: Any) -> None:
    made = scene()
    await made.accept()

    def snapshot(boot: bytes) -> worker_pb2.BlockEvents:
        return worker_pb2.BlockEvents(
            boot_id=boot, snapshot=True, snapshot_end=True, stored=b"i" * 16
        )

    made.dialer.blocks.put_nowait(snapshot(b"c" * 16))
    made.dialer.blocks.put_nowait(snapshot(BOOT))
    await eventually(lambda: made.index.match([b"i" * 16]) == {"decode-0": 1})
    assert made.link.up  # the link does not suffer from it


async def test_a_worker_that_does_not_read_is_noticed(scene: Any) -> None:
    made = scene(RouterConfig(link_queue=4))
    await made.accept()
    with pytest.raises(Overloaded):
        for _ in range(5):  # within one tick: nothing is written meanwhile
            made.link.send(submit("r"))


async def test_the_end_tells_the_bearer(scene: Any) -> None:
    made = scene()
    await made.accept()
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    assert made.notes.losses == [(None, "the router let the worker go")]
    assert not made.link.up


async def test_a_drained_worker_that_leaves_is_given_up_at_once(
    scene: Any, eventually: Any
) -> None:
    """Its requests wait for no grace: it said that it would not come back."""
    made = scene(RouterConfig(link_heartbeat_s=0.02, link_silence_s=5.0, link_grace_s=60.0))
    far = await made.accept()
    await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load(draining=True)))
    await eventually(lambda: made.link.load.draining)
    breaks: Any = metrics.LINK_BREAKS
    before = breaks._value.get()
    made.dialer.reachable = False
    await far.close()
    async with asyncio.timeout(5):
        await eventually(lambda: made.notes.losses)
    assert made.notes.losses[0][0] is None and not made.link.parked
    assert breaks._value.get() == before  # it is no fault of the network
