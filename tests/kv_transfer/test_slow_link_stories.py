"""Many handoffs that share a slow link, on virtual time: slow is not stuck, and stuck is seen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.kv_transfer.fetch_report import FetchReport
from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.runtime.errors import LeaseLost, ReadFailed
from tests.support import handoff_stage

COUNT = 5
TIMEOUT_S = 0.5


def shared(blocks_per_s: float, **more: Any) -> handoff_stage.Stage:
    """READs of two blocks; a window of two of them."""
    stage = handoff_stage.Stage(read_timeout_s=TIMEOUT_S, **more)
    stage.exchange.bytes_per_s = blocks_per_s * handoff_stage.BLOCK_BYTES
    return stage


def begin(stage: handoff_stage.Stage) -> list[asyncio.Task[FetchReport]]:
    """Handoffs of six blocks each, into blocks of their own."""
    names = [handoff_stage.name_of(index) for index in range(6)]
    return [
        asyncio.ensure_future(
            stage.fetch(
                stage.granter_link(handoff_stage.chunked()),
                stage.opening(),
                list(range(6 * number, 6 * number + 6)),
                names,
            )
        )
        for number in range(COUNT)
    ]


@pytest.mark.parametrize("blocks_per_s", [100.0, 10.0, 1.0])
def test_none_times_out_however_long_its_reads_wait(blocks_per_s: float) -> None:
    stage = shared(blocks_per_s)

    async def main() -> None:
        await asyncio.gather(*begin(stage))
        for report in await stage.ended():
            assert report.end == "closed"

    _, loop = handoff_stage.on_virtual_time(main)
    assert loop.time() >= 6 * COUNT / blocks_per_s and not stage.quarantined
    for number in range(COUNT):
        assert handoff_stage.moved(
            stage, list(range(6 * number, 6 * number + 6)), handoff_stage.THEIRS
        )


def test_a_stuck_read_fails_in_time_and_the_others_complete() -> None:
    """Its time begins as it is posted, long after it was asked for."""
    stage = shared(2.0)
    posted_at: list[float] = []

    def decide(attempt: Attempt) -> Fate:
        if attempt.number != 5:
            return Fate()
        posted_at.append(asyncio.get_running_loop().time())
        return Fate(stuck=True)

    stage.exchange.decide = decide
    failed_at: list[float] = []

    async def watched(fetch: asyncio.Task[FetchReport]) -> None:
        try:
            await fetch
        except ReadFailed as error:
            assert "made no progress for 0.5 s" in str(error)
            failed_at.append(asyncio.get_running_loop().time())

    async def main() -> None:
        await asyncio.gather(*(watched(fetch) for fetch in begin(stage)))
        stage.exchange.release_stuck()
        await stage.ended()

    handoff_stage.on_virtual_time(main)
    assert posted_at[0] > 3 and failed_at == [pytest.approx(posted_at[0] + TIMEOUT_S, abs=1e-6)]
    (blocks, _), *others = stage.quarantined
    assert len(blocks) == 2 and not others


def test_a_leaving_reader_drops_its_waiting_reads() -> None:
    """Cancelled, its READs that wait have settled, and the others' turns come sooner."""
    stage = shared(2.0)

    async def main() -> None:
        fetches = begin(stage)
        await asyncio.sleep(2.5)  # both READs of each window are asked for
        reads = stage.exchange.reads
        for fetch in fetches[:-1]:
            fetch.cancel()
        await asyncio.wait(fetches[:-1])
        assert len(stage.quarantined) <= 1  # of the READ whose bytes moved just then
        await fetches[-1]
        left = stage.exchange.reads - reads
        assert left == 1  # the last handoff's third READ: no other handoff asked for one
        for report in await stage.ended():
            assert report.end == "closed"

    _, loop = handoff_stage.on_virtual_time(main)
    assert loop.time() < 2.5 + 2 + 3 + 2


def test_a_lost_lease_drops_waiting_reads_and_posts_none_after() -> None:
    stage = shared(0.5)
    posted_at: list[float] = []

    def decide(attempt: Attempt) -> Fate:
        posted_at.append(asyncio.get_running_loop().time())
        return Fate()

    stage.exchange.decide = decide

    async def main() -> None:
        link = stage.granter_link(handoff_stage.chunked())
        link.lose_renewals = True
        names = [handoff_stage.name_of(index) for index in range(6)]
        with pytest.raises(LeaseLost, match="ran out"):
            await stage.fetch(link, stage.opening(), handoff_stage.OWN, names)
        assert asyncio.get_running_loop().time() == pytest.approx(1.8)  # 0.9 of the lease
        (blocks, settled), *others = stage.quarantined
        assert blocks == handoff_stage.OWN[:2] and not others  # the other READ had not been posted
        await settled
        await stage.ended()

    handoff_stage.on_virtual_time(main)
    assert posted_at == [pytest.approx(0.05)]
