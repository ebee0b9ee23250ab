"""One worker's link over memory links: the test holds their far ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

from baton.proto import worker_pb2
from baton.router.fleet.radix_index import RadixIndex
from baton.router.fleet.unplaced_requests import UnplacedRequests
from baton.router.fleet.worker_link import WorkerLink
from baton.runtime.config import RouterConfig
from baton.runtime.links import LinkClosed, MemoryLink, memory_link
from baton.runtime.registry import WorkerRecord
from baton.runtime.wire import ModelLimits
from tests.support.waiting import eventually

BOOT = b"b" * 16
CONFIG = RouterConfig(link_heartbeat_s=0.02, link_silence_s=5.0, link_grace_s=0.3)
LIMITS = ModelLimits(300, 40, "f", "d", b"key")
HELLO = worker_pb2.WorkerMessage(hello=LIMITS.hello("decode-0", BOOT, "decode", 4, 10))
NearEnd = MemoryLink[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]  # the router's
FarEnd = MemoryLink[worker_pb2.WorkerMessage, worker_pb2.RouterMessage]


class MemoryDialer:
    """Each dialled link's far end comes out of `dialled`; block events are put in `blocks`."""

    def __init__(self) -> None:
        self.dialled: asyncio.Queue[FarEnd] = asyncio.Queue(100)
        self.blocks: asyncio.Queue[worker_pb2.BlockEvents] = asyncio.Queue(100)
        self.reachable = True
        self.write_s = 0.0  # after a message was sent, until the link takes the next one

    def connect(self, address: str) -> MemoryConnection:
        return MemoryConnection(self)


class MemoryConnection:
    def __init__(self, dialer: MemoryDialer) -> None:
        self._dialer = dialer

    def link(self) -> NearEnd | SlowLink:
        if not self._dialer.reachable:
            raise LinkClosed("unreachable")
        ends: tuple[NearEnd, FarEnd] = memory_link()
        near, far = ends
        self._dialer.dialled.put_nowait(far)
        return near if not self._dialer.write_s else SlowLink(near, self._dialer.write_s)

    async def watch_blocks(self) -> AsyncIterator[worker_pb2.BlockEvents]:
        while True:
            yield await self._dialer.blocks.get()

    async def close(self) -> None:
        pass


class SlowLink:
    """The link `near`, on which each write takes `write_s`, as over a network."""

    def __init__(self, near: NearEnd, write_s: float) -> None:
        self._write_s = write_s
        self._near, self.receive, self.close = near, near.receive, near.close

    async def send(self, message: worker_pb2.RouterMessage) -> None:
        await self._near.send(message)
        await asyncio.sleep(self._write_s)  # A write takes this long.


class Notes:
    """A LinkListener that writes down what it receives."""

    def __init__(self) -> None:
        self.outputs: list[worker_pb2.StepOutputs] = []
        self.losses: list[tuple[list[str] | None, str]] = []
        self.waiting: list[worker_pb2.Resume] = []
        self.hangs = 0
        self.crowded = False

    def take(self, link: WorkerLink, outputs: worker_pb2.StepOutputs) -> bool:
        self.outputs.append(outputs)
        return self.crowded

    def pending(self, link: WorkerLink) -> list[worker_pb2.Resume]:
        return self.waiting

    def lost(self, link: WorkerLink, request_ids: Iterable[str] | None, reason: str) -> None:
        self.losses.append((None if request_ids is None else list(request_ids), reason))

    def hung(self, link: WorkerLink) -> None:
        self.hangs += 1


class LinkScene:
    """The link of a worker, which runs until its loop is closed. `changes` are made to CONFIG."""

    boot_id = BOOT

    def __init__(self, worker_id: str = "decode-0", **changes: Any) -> None:
        config = replace(CONFIG, **changes)
        self.dialer, self.notes, self.index = MemoryDialer(), Notes(), RadixIndex()
        self.unplaced = UnplacedRequests()
        record = WorkerRecord(worker_id, BOOT.hex(), "decode", "h:1", "", "m", 1)
        self.link = WorkerLink(
            record,
            self.dialer,
            self.notes,
            config,
            index=self.index,
            router_boot_id=b"r" * 16,
            vocab_size=300,
            unplaced=self.unplaced,
        )
        self.task = asyncio.create_task(self.link.run())

    async def accept(self, hello: worker_pb2.WorkerMessage = HELLO) -> FarEnd:
        """The far end of the next link, after its hello was answered."""
        async with asyncio.timeout(20):
            far = await self.dialer.dialled.get()
            first = await far.receive()
            assert first.WhichOneof("kind") == "hello"
            self.router_hello = first.hello
            await far.send(hello)
            await eventually(lambda: self.link.up, every_s=0.005)
        return far

    async def next(self, far: FarEnd, kind: str) -> Any:
        async with asyncio.timeout(20):
            while True:
                message = await far.receive()
                if message.WhichOneof("kind") == kind:
                    return getattr(message, kind)

    @staticmethod
    def hello(**fields: Any) -> worker_pb2.WorkerMessage:
        """Return the handshake of `decode-0` with these fields changed."""
        made = worker_pb2.WorkerMessage()
        made.CopyFrom(HELLO)
        for name, value in fields.items():
            setattr(made.hello, name, value)
        return made

    @staticmethod
    def submit(request_id: str) -> worker_pb2.RouterMessage:
        return worker_pb2.RouterMessage(submit=worker_pb2.Submit(request_id=request_id))
