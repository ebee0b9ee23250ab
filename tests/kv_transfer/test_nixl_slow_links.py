"""NIXL's READs over slow links, with scripted bindings: little is posted at a time, a READ's time
counts from its posting and from each segment, and what no task waits for is never posted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.kv_transfer import nixl_agent, read_segments
from baton.kv_transfer.fetch_report import FetchReport
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.nixl_mover import NixlMover
from baton.runtime.errors import ReadFailed
from tests.support import handoff_stage
from tests.support.scripted_nixl import NixlHandle, ScriptedAgent

pytestmark = pytest.mark.timed

BLOCKS = 32
BLOCK_BYTES = 256
ONE, OTHER = b"1" * 16, b"2" * 16
DEADLINE_S = 30.0
ENOUGH = 2  # segments of a peer under way, here of a block each


class Link(ScriptedAgent):
    """A link that moves a segment in `segment_s`, in order; of peers in `cut`, none."""

    def __init__(self, segment_s: float = 0.0) -> None:
        super().__init__()
        self.segment_s = segment_s
        self.cut: set[str] = set()
        self.ends: dict[int, float] = {}
        self._free_at = 0.0

    def make_prepped_xfer(
        self,
        kind: str,
        local: NixlHandle,
        own: Sequence[int],
        remote: NixlHandle,
        far: Sequence[int],
    ) -> NixlHandle:
        handle = super().make_prepped_xfer(kind, local, own, remote, far)
        if remote.what.removeprefix("blocks of ") in self.cut:
            handle.state = "stuck"
        return handle

    def transfer(self, handle: NixlHandle) -> str:
        if handle.state != "stuck":
            self._free_at = max(self._free_at, time.monotonic()) + self.segment_s
            self.ends[id(handle)] = self._free_at
        return "PROC"

    def check_xfer_state(self, handle: NixlHandle) -> str:
        if self.segment_s == 0.0:  # the test says
            return handle.state
        landed = time.monotonic() >= self.ends.get(id(handle), np.inf)
        return "DONE" if landed else "PROC"


Made = tuple[NixlMover, Link]


@pytest.fixture
async def mover_on(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[Link], NixlMover]]:
    movers: list[NixlMover] = []

    def make(link: Link) -> NixlMover:
        bindings = SimpleNamespace(
            __name__="scripted",
            nixl_agent=lambda name, config: link,
            nixl_agent_config=lambda **options: options,
        )
        monkeypatch.setattr(nixl_agent, "load_bindings", lambda: bindings)
        monkeypatch.setattr(nixl_agent, "STOP_TIMEOUT_S", 0.1)
        monkeypatch.setattr(read_segments, "SEGMENT_BYTES", BLOCK_BYTES)
        pool = HostPool(np.zeros((BLOCKS, BLOCK_BYTES), np.uint8), 4)
        movers.append(NixlMover(pool, b"R" * 16))
        return movers[-1]

    yield make
    for mover in movers:
        await mover.close()


def peer(boot_id: bytes) -> PeerPool:
    return PeerPool(boot_id, "nixl", boot_id[:1], 1 << 33, BLOCK_BYTES, BLOCKS)


@pytest.fixture
async def made(mover_on: Callable[[Link], NixlMover]) -> Made:
    """A mover connected to two peers, and the link, which moves what the test says."""
    link = Link()
    mover = mover_on(link)
    for boot_id in (ONE, OTHER):
        await mover.connect(peer(boot_id))
    return mover, link


async def turns(link: Link) -> None:
    """Until the agent's thread has gone round a few times."""
    await asyncio.to_thread(link.wait_polls, 3)


async def ended(future: asyncio.Future[None]) -> None:
    await asyncio.wait({future}, timeout=DEADLINE_S)
    assert future.done()


async def test_little_is_posted_from_a_peer_and_the_next_as_it_lands(made: Made) -> None:
    mover, link = made
    first, second = mover.read(ONE, range(3), range(3)), mover.read(ONE, range(3), range(3, 6))
    other = mover.read(OTHER, [9], [9])
    await turns(link)
    assert sorted(own for own, _ in link.indices) == [[0], [1], [9]]
    link.posted[0].state = "DONE"
    await turns(link)
    assert link.indices[3:] == [([2], [2])]
    for index in range(1, 6):
        link.posted[index].state = "DONE"
        await turns(link)
    assert first.landed.done() and other.landed.done() and not second.landed.done()
    link.posted[6].state = "DONE"
    await ended(second.landed)
    assert [own for own, _ in link.indices[3:]] == [[2], [3], [4], [5]]


async def test_an_abandoned_waiting_read_settles_and_is_never_posted(made: Made) -> None:
    mover, link = made
    first, second = mover.read(ONE, range(3), range(3)), mover.read(ONE, range(3), range(3, 6))
    await turns(link)
    second.abandon()
    assert second.settled.done() and "abandoned" in str(second.landed.exception())
    second.abandon()  # once more does no harm
    first.abandon()
    await turns(link)
    assert not first.settled.done()  # two segments are under way: only NIXL ends them
    for handle in link.posted:
        handle.state = "DONE"
    await ended(first.settled)
    assert isinstance(first.landed.exception(), ReadFailed)
    assert [own for own, _ in link.indices] == [[0], [1]]


async def test_sums_of_an_abandoned_read_fail_with_it(made: Made) -> None:
    mover, _ = made
    mover.read(ONE, range(ENOUGH), range(ENOUGH))
    read = mover.read(ONE, [3], [3], [7])
    read.abandon()
    assert read.checksums is not None and isinstance(read.checksums.exception(), ReadFailed)


async def test_an_endless_read_makes_room_when_it_has_no_waiter(made: Made) -> None:
    """The posted segments of a READ that was given up count no longer: the next one is tried."""
    mover, link = made
    stuck = mover.read(ONE, range(2), range(2))
    waiting = mover.read(ONE, range(2), range(2, 4))
    await turns(link)
    assert len(link.posted) == ENOUGH
    stuck.abandon()
    await turns(link)
    assert [own for own, _ in link.indices] == [[0], [1], [2], [3]]
    for handle in link.posted[2:]:
        handle.state = "DONE"
    await ended(waiting.landed)
    assert not stuck.settled.done()  # its blocks are still its target
    for handle in link.posted:
        handle.state = "ERR"
    await ended(stuck.settled)


async def test_time_counts_from_the_posting_and_from_each_piece(made: Made) -> None:
    mover, link = made
    clock = asyncio.get_running_loop().time
    first, second = mover.read(ONE, range(3), range(3)), mover.read(ONE, [3], [3])
    await turns(link)
    posted, waits = first.moved_at, second.moved_at
    assert posted <= clock() and waits <= clock()
    # The clock has to differ from the time of the posting.
    await asyncio.sleep(0.02)
    before = clock()
    link.posted[0].state = "DONE"
    await turns(link)
    assert first.moved_at >= before and second.moved_at >= before
    # The clock has to differ from the time of the first piece.
    await asyncio.sleep(0.02)
    before = clock()
    link.posted[1].state = "DONE"
    await turns(link)
    assert len(link.posted) == 4 and second.moved_at >= before  # it was posted


async def test_a_peers_pieces_that_wait_fail_when_it_is_forgotten(made: Made) -> None:
    mover, link = made
    under_way, waiting = mover.read(ONE, range(2), range(2)), mover.read(ONE, [3], [3])
    await turns(link)
    mover.forget(ONE)
    await ended(waiting.settled)
    assert "not connected" in str(waiting.landed.exception()) and not under_way.settled.done()
    for handle in link.posted:
        handle.state = "ERR"
    await ended(under_way.settled)


async def handoffs(stage: handoff_stage.Stage, count: int) -> list[FetchReport | BaseException]:
    """As many handoffs at once, of six blocks each, to their ends; what each returned or raised."""

    def own(number: int) -> list[int]:
        return list(range(6 * number, 6 * number + 6))

    names = [handoff_stage.name_of(index) for index in range(6)]
    fetches = [
        stage.fetch(
            stage.granter_link(handoff_stage.chunked(pause=0.001)), stage.opening(), own(n), names
        )
        for n in range(count)
    ]
    ends = await asyncio.gather(*fetches, return_exceptions=True)
    await stage.ended()
    return ends


def slow_stage(mover: NixlMover, **config: Any) -> handoff_stage.Stage:
    """No bytes move, so none are verified."""
    stage = handoff_stage.Stage(verify=False, **{"read_timeout_s": 0.4, "window_reads": 4} | config)
    stage.reader = mover
    return stage


async def test_many_handoffs_over_a_slow_link_all_come_through(
    mover_on: Callable[[Link], NixlMover],
) -> None:
    """It takes three times as long as a READ may stand still."""
    link = Link(segment_s=0.08)
    stage = slow_stage(mover_on(link), read_timeout_s=0.8)
    begun = time.monotonic()
    ends = await handoffs(stage, 5)
    assert time.monotonic() - begun > 2.3 and len(link.posted) == 30
    assert [type(end).__name__ for end in ends] == ["FetchReport"] * 5
    assert not stage.quarantined


async def test_stalled_reads_fail_in_time_and_keep_only_posted_blocks(
    mover_on: Callable[[Link], NixlMover],
) -> None:
    link = Link(segment_s=0.001)
    link.cut.add("")  # the memory mover's metadata: the name of the granter
    mover = mover_on(link)
    stage = slow_stage(mover, lease_s=1.0)
    begun = time.monotonic()
    ends = await handoffs(stage, 5)
    for end in ends:
        assert isinstance(end, ReadFailed) and "made no progress for 0.4 s" in str(end)
    assert 0.4 <= time.monotonic() - begun < 10
    assert len(link.posted) < 30  # nothing more is posted for those who have left
    kept = {block for blocks, _ in stage.quarantined for block in blocks}
    posted = {block for own, _ in link.indices for block in own}
    assert posted <= kept and len(kept) <= 2 * len(link.posted)  # READs are of two blocks
