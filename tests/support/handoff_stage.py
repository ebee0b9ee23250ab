"""A handoff between two pools of one process, on virtual time.

`VirtualLoop` jumps to the next timer instead of sleeping, and raises where nothing could ever
happen again, so that a hang is a failure at once. `Stage` holds both ends, scripted.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from baton.kv_transfer.checksum_cache import ChecksumCache
from baton.kv_transfer.fetch_report import FetchReport
from baton.kv_transfer.granter import Computed, GrantingWorker, GrantReport, grant
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import Attempt, Fate, MemoryExchange, MemoryMover
from baton.kv_transfer.reader import HandoffReader
from baton.kv_transfer.session import ReaderLink
from baton.proto import handoff_pb2
from baton.runtime.config import HandoffConfig
from baton.runtime.links import MemoryLink, memory_link

T = TypeVar("T")

GRANTER = b"G" * 16
READER = b"R" * 16
SLABS = 4
BLOCK_BYTES = 256
POOL_BLOCKS = 32
BLOCK_TOKENS = 4
LONGEST_STORY_S = 10_000.0

Item = Computed | handoff_pb2.FirstTokens | float | Exception  # a float: seconds of work

ReaderEnd = MemoryLink[handoff_pb2.ReaderMessage, handoff_pb2.GranterMessage]
GranterEnd = MemoryLink[handoff_pb2.GranterMessage, handoff_pb2.ReaderMessage]


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0  # the earliest: a time of zero must not read as no time
        self.steps = 0
        self.at_step: dict[int, Callable[[], object]] = {}

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        self.steps += 1
        self.at_step.pop(self.steps, lambda: None)()
        # typeshed declares no private parts of asyncio's loop
        if not self._ready:  # type: ignore[attr-defined]
            timers = [t for t in self._scheduled if not t.cancelled()]  # type: ignore[attr-defined]
            if not timers:
                raise RuntimeError("nothing can ever happen again: a wait without a deadline")
            self._now = max(self._now, min(timer.when() for timer in timers))
            if self._now > LONGEST_STORY_S:
                raise RuntimeError("the story goes on for ever")
        super()._run_once()  # type: ignore[misc] # typeshed does not declare it


def on_virtual_time(
    main: Callable[[], Coroutine[Any, Any, T]], cancel_at: int | None = None
) -> tuple[T, VirtualLoop]:
    """Run to the end; afterwards no task may be alive. `cancel_at`: cancel `main` then."""
    loop = VirtualLoop()
    complaints: list[str] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    try:
        task = loop.create_task(main())
        if cancel_at is not None:
            loop.at_step[cancel_at] = task.cancel
        result = loop.run_until_complete(task)
        left = [str(t.get_coro()) for t in asyncio.all_tasks(loop)]
        assert not left, f"tasks leaked: {left}"
        assert not complaints, complaints
        return result, loop
    finally:
        loop.close()


class ScriptedPrompt:
    """Plays `items`; counts what the granter must do exactly once."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = list(items)
        self.ended_at: list[float] = []

    async def next(self) -> Computed | handoff_pb2.FirstTokens | None:
        while self.items:
            item = self.items.pop(0)
            if isinstance(item, float):
                await asyncio.sleep(item)
            elif isinstance(item, Exception):
                raise item
            else:
                return item
        return None

    def end(self) -> None:
        self.ended_at.append(asyncio.get_running_loop().time())


class Stage:
    """Both pools, the exchange between them, and what became of everything."""

    def __init__(self, decide: Callable[[Attempt], Fate] | None = None, **config: Any) -> None:
        config = {"read_bytes": 2 * BLOCK_BYTES, "window_reads": 2} | config
        self.config = dataclasses.replace(HandoffConfig(), **config)
        random = np.random.default_rng(7)
        shape = (POOL_BLOCKS, BLOCK_BYTES)
        self.granted = random.integers(0, 256, shape, dtype=np.uint8)
        self.own = np.zeros(shape, dtype=np.uint8)
        self.exchange = MemoryExchange(decide)
        self.granter = MemoryMover(HostPool(self.granted, SLABS), GRANTER, self.exchange)
        self.reader = MemoryMover(HostPool(self.own, SLABS), READER, self.exchange)
        self.quarantined: list[tuple[list[int], asyncio.Future[None]]] = []
        self.first: list[handoff_pb2.FirstTokens] = []
        self.grants: list[asyncio.Task[GrantReport]] = []
        self.readers: list[HandoffReader] = []
        self.checksum_cache: ChecksumCache | None = None
        self.sent: list[str] = []
        self.reports: list[GrantReport] = []

    def opening(self, blocks: int = 6, held: int = 0, partial: int = 0) -> handoff_pb2.OpenHandoff:
        tokens = blocks * BLOCK_TOKENS + (partial - BLOCK_TOKENS if partial else 0)
        return handoff_pb2.OpenHandoff(
            handoff_id=b"H" * 16,
            granter_boot_id=GRANTER,
            reader_boot_id=READER,
            tokens=list(range(tokens)),
            held_blocks=held,
            choices=[0],
            lease_ms=round(self.config.lease_s * 1000),
        )

    def granting(self) -> GrantingWorker:
        return GrantingWorker(self.granter, GRANTER, self.config, self.checksum_cache)

    def granter_link(self, prompt: ScriptedPrompt) -> Recorded:
        """A new stream; its far end is served at once, by a task that outlives the stream."""
        ends: tuple[ReaderEnd, GranterEnd] = memory_link()
        near, far = ends
        task = grant(far, lambda _: prompt, self.granting())
        self.grants.append(asyncio.ensure_future(task))
        return Recorded(near, self.sent)

    async def fetch(
        self,
        link: ReaderLink,
        opening: handoff_pb2.OpenHandoff,
        own: Sequence[int],
        identities: Sequence[bytes],
    ) -> FetchReport:
        await self.reader.connect(self.granter.describe())
        reader = HandoffReader(
            link, self.reader, GRANTER, BLOCK_TOKENS, self.config, self.quarantine_blocks
        )
        self.readers.append(reader)
        return await reader.fetch(opening, own, identities, self.first.append)

    def quarantine_blocks(self, blocks: Sequence[int], settled: asyncio.Future[None]) -> None:
        self.quarantined.append((list(blocks), settled))

    async def ended(self) -> list[GrantReport]:
        """Wait for every task of both ends."""
        for reader in self.readers:
            await reader.finished()
        return [await task for task in self.grants]


class Recorded:
    """A reader's link end that notes what is sent and can lose renewals."""

    def __init__(self, link: ReaderEnd, sent: list[str]) -> None:
        self._link = link
        self._sent = sent
        self.lose_renewals = False

    async def send(self, message: handoff_pb2.ReaderMessage) -> None:
        kind = str(message.WhichOneof("kind"))
        self._sent.append(kind)
        if not (self.lose_renewals and kind == "renew"):
            await self._link.send(message)

    async def receive(self) -> handoff_pb2.GranterMessage:
        return await self._link.receive()

    async def close(self) -> None:
        await self._link.close()


def name_of(index: int) -> bytes:
    """The identity of the block at an index of the scripted prompt."""
    return bytes([index + 1]) * 16


def computed(first: int, blocks: Sequence[int], partial: int = 0) -> Computed:
    names = () if partial else tuple(name_of(first + i) for i in range(len(blocks)))
    return Computed(first, tuple(blocks), names, partial)


def first_tokens(choice: int = 0) -> handoff_pb2.FirstTokens:
    return handoff_pb2.FirstTokens(tokens=[handoff_pb2.FirstToken(choice=choice, token=5)])


OWN = [20, 3, 21, 5, 9, 30]  # scattered own blocks
THEIRS = [4, 11, 2, 7, 8, 25]


def moved(stage: Stage, own: list[int], theirs: list[int]) -> bool:
    return bool(np.array_equal(stage.own[own], stage.granted[theirs]))


def chunked(pause: float = 0.05) -> ScriptedPrompt:
    """Three chunks of two blocks, then the first token."""
    items: list[Item] = []
    for first in (0, 2, 4):
        items += [pause, computed(first, THEIRS[first : first + 2])]
    return ScriptedPrompt([*items, first_tokens()])


async def play(stage: Stage, prompt: ScriptedPrompt, **opening: int) -> FetchReport:
    """Fetch all six blocks; both ends finished."""
    held = opening.get("held", 0)
    full = 5 if opening.get("partial") else 6
    names = [name_of(index) for index in range(held, full)]
    try:
        return await stage.fetch(
            stage.granter_link(prompt), stage.opening(**opening), OWN[held:], names
        )
    finally:
        stage.reports = await stage.ended()


def nothing_left(stage: Stage, *prompts: ScriptedPrompt) -> None:
    assert [len(prompt.ended_at) for prompt in prompts] == [1] * len(prompts)
    assert stage.granter.holds == 0
    assert all(settled.done() for _, settled in stage.quarantined)
    assert stage.exchange.stuck == 0
