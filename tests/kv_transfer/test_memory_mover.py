"""The in-memory mover keeps the seam's promises, and its faults are the ones that were asked."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.kv_transfer.checksum import reference
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import Attempt, Fate, MemoryMover, MemoryRead
from baton.runtime.errors import ReadFailed
from tests.support import handoff_stage


async def connected(stage: handoff_stage.Stage) -> MemoryMover:
    await stage.reader.connect(stage.granter.describe())
    return stage.reader


async def checksums_of(read: MemoryRead) -> NDArray[np.uint64]:
    assert read.checksums is not None
    return await read.checksums


def test_bytes_are_those_of_the_moment_of_landing() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=1.0))

    async def main() -> None:
        mover = await connected(stage)
        read = mover.read(handoff_stage.GRANTER, [1], [2])
        stage.granted[1] = 77
        assert not stage.own.any() and not read.settled.done()
        await read.landed
        assert read.settled.done() and (stage.own[2] == 77).all()

    handoff_stage.on_virtual_time(main)


def test_a_failed_read_settles_and_brings_nothing() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=0.5, failed=True))

    async def main() -> None:
        mover = await connected(stage)
        read = mover.read(handoff_stage.GRANTER, [1], [2])
        with pytest.raises(ReadFailed, match="failed"):
            await read.landed
        assert read.settled.done() and not stage.own.any()

    handoff_stage.on_virtual_time(main)


def test_a_stuck_read_lands_only_when_released() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(stuck=attempt.number == 1))

    async def main() -> None:
        mover = await connected(stage)
        stuck, free = (
            mover.read(handoff_stage.GRANTER, [1], [2]),
            mover.read(handoff_stage.GRANTER, [3], [4]),
        )
        await free.landed
        # A stuck READ may never settle, here not in this virtual time.
        await asyncio.sleep(1000.0)
        assert not stuck.settled.done() and stage.exchange.stuck == 1
        assert stage.exchange.release_stuck() == 1
        await stuck.settled
        assert (stage.own[2] == stage.granted[1]).all() and stage.exchange.release_stuck() == 0

    handoff_stage.on_virtual_time(main)


def test_a_dead_granter_fails_reads_under_way() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=1.0))

    async def main() -> None:
        mover = await connected(stage)
        read = mover.read(handoff_stage.GRANTER, [1], [2])
        await stage.granter.close()
        with pytest.raises(ReadFailed):
            await read.landed
        assert read.settled.done()
        with pytest.raises(ReadFailed, match="no worker"):
            await mover.connect(stage.granter.describe())

    handoff_stage.on_virtual_time(main)


def test_corruption_flips_one_bit_of_one_block() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(corrupt=1))

    async def main() -> None:
        mover = await connected(stage)
        await mover.read(handoff_stage.GRANTER, [1, 2], [3, 4]).landed
        wrong = np.unpackbits(stage.own[[3, 4]] ^ stage.granted[[1, 2]])
        assert wrong.sum() == 1 and (stage.own[3] == stage.granted[1]).all()

    handoff_stage.on_virtual_time(main)


@pytest.mark.parametrize("kind", ["short", "wrong", "stale"])
def test_wrong_bytes_land_silently_in_a_block_or_from_a_pool(kind: str) -> None:
    stage = handoff_stage.Stage(
        decide=lambda _: Fate(stale=handoff_stage.READER) if kind == "stale" else Fate(**{kind: 1})
    )

    async def main() -> None:
        mover = await connected(stage)
        stage.own[:] = 9
        stage.own[2] = 55
        await mover.read(handoff_stage.GRANTER, [1, 2], [3, 4]).landed
        if kind == "stale":
            assert (stage.own[3] == 9).all() and (stage.own[4] == 55).all()
            return
        assert (stage.own[3] == stage.granted[1]).all()
        half = stage.own.shape[1] // 2
        if kind == "short":
            assert (stage.own[4, :half] == stage.granted[2, :half]).all()
            assert (stage.own[4, half:] == 9).all()
        else:
            assert (stage.own[4] == stage.granted[3]).all()

    handoff_stage.on_virtual_time(main)


def test_blocks_that_land_early_land_again_with_the_others() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=1.0, early=1))

    async def main() -> None:
        mover = await connected(stage)
        read = mover.read(handoff_stage.GRANTER, [1, 3], [2, 4])
        # The first segment has landed by then, the second has not; on virtual time.
        await asyncio.sleep(0.6)
        assert (stage.own[2] == stage.granted[1]).all() and not stage.own[4].any()
        assert not read.landed.done() and not read.settled.done()
        stage.granted[1] = 77
        await read.landed
        assert (stage.own[2] == 77).all() and (stage.own[4] == stage.granted[3]).all()

    handoff_stage.on_virtual_time(main)


def test_nothing_lands_early_from_a_granter_that_is_gone() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=1.0, early=1))

    async def main() -> None:
        mover = await connected(stage)
        read = mover.read(handoff_stage.GRANTER, [1], [2])
        stage.exchange.leave(handoff_stage.GRANTER)
        with pytest.raises(ReadFailed):
            await read.landed
        assert not stage.own.any()

    handoff_stage.on_virtual_time(main)


def test_some_of_the_stuck_reads_land_and_the_others_stay() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(stuck=True))

    async def main() -> None:
        mover = await connected(stage)
        one, other = (
            mover.read(handoff_stage.GRANTER, [1], [2]),
            mover.read(handoff_stage.GRANTER, [3], [4]),
        )
        assert stage.exchange.release_stuck(lambda attempt: attempt.remote == (3,)) == 1
        assert other.settled.done() and not one.settled.done() and stage.exchange.stuck == 1

    handoff_stage.on_virtual_time(main)


def test_the_exchange_tells_of_a_landing_before_it() -> None:
    stage = handoff_stage.Stage(
        decide=lambda attempt: Fate(delay_s=1.0, failed=attempt.number == 2)
    )
    seen: list[tuple[int, bool]] = []
    stage.exchange.landing = lambda attempt: seen.append((attempt.number, bool(stage.own.any())))

    async def main() -> None:
        mover = await connected(stage)
        await mover.read(handoff_stage.GRANTER, [1], [2]).landed
        with pytest.raises(ReadFailed):
            await mover.read(handoff_stage.GRANTER, [1], [2]).landed

    handoff_stage.on_virtual_time(main)
    assert seen == [(1, False)]


def test_fate_sees_reader_granter_and_blocks() -> None:
    seen: list[Attempt] = []

    def decide(attempt: Attempt) -> Fate:
        seen.append(attempt)
        return Fate()

    stage = handoff_stage.Stage(decide)

    async def main() -> None:
        mover = await connected(stage)
        await mover.read(handoff_stage.GRANTER, [5, 6], [7, 8]).landed

    handoff_stage.on_virtual_time(main)
    assert seen == [Attempt(1, handoff_stage.READER, handoff_stage.GRANTER, (5, 6), (7, 8))]


def test_an_unknown_or_forgotten_peer_is_refused() -> None:
    stage = handoff_stage.Stage()

    async def main() -> None:
        with pytest.raises(ReadFailed, match="not connected"):
            stage.reader.peer(handoff_stage.GRANTER)
        mover = await connected(stage)
        assert mover.peer(handoff_stage.GRANTER) == stage.granter.describe()
        with pytest.raises(ReadFailed, match="do not fit"):
            mover.read(handoff_stage.GRANTER, [1, 2], [3])
        mover.forget(handoff_stage.GRANTER)
        with pytest.raises(ReadFailed, match="not connected"):
            mover.read(handoff_stage.GRANTER, [1], [2])

    handoff_stage.on_virtual_time(main)


def test_sums_are_the_algorithms_and_take_their_time() -> None:
    stage = handoff_stage.Stage()
    stage.exchange.checksum_s = 0.25

    async def main() -> None:
        sums = await stage.granter.checksums([3, 1], [9, 8])
        assert (sums == reference(stage.granted, [3, 1], [9, 8], handoff_stage.SLABS)).all()

    _, loop = handoff_stage.on_virtual_time(main)
    assert loop.time() == pytest.approx(0.25)


def test_slabs_that_do_not_divide_a_block_are_refused() -> None:
    stage = handoff_stage.Stage()
    with pytest.raises(ValueError, match="8-byte words"):
        MemoryMover(HostPool(stage.own, slabs=7), b"x" * 16, stage.exchange)


@pytest.mark.parametrize("checksum_s", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("window_reads", [1, 3])
def test_sums_that_come_at_any_time_are_never_lost(checksum_s: float, window_reads: int) -> None:
    """Own sums and the granter's arrive in any order, for several READs at once."""
    stage = handoff_stage.Stage(
        lambda attempt: Fate(delay_s=0.005 * (attempt.number % 3)),
        read_bytes=handoff_stage.BLOCK_BYTES,
        window_reads=window_reads,
    )
    stage.exchange.checksum_s = checksum_s
    prompt = handoff_stage.chunked(pause=0.004)
    report, _ = handoff_stage.on_virtual_time(lambda: handoff_stage.play(stage, prompt))
    assert report.reads == 6 and report.rereads == 0
    assert handoff_stage.moved(stage, handoff_stage.OWN, handoff_stage.THEIRS)
    handoff_stage.nothing_left(stage, prompt)


def test_a_fetch_cancelled_while_summing_leaves_nothing() -> None:
    stage = handoff_stage.Stage()
    stage.exchange.checksum_s = 1.0
    prompt = handoff_stage.chunked()

    async def main() -> None:
        fetch = asyncio.ensure_future(handoff_stage.play(stage, prompt))
        # The READ is under way by then, on virtual time.
        await asyncio.sleep(0.6)
        fetch.cancel()
        await asyncio.wait({fetch})
        assert fetch.cancelled()

    handoff_stage.on_virtual_time(main)
    assert stage.sent[-1] == "closed" and not stage.quarantined
    handoff_stage.nothing_left(stage, prompt)


def test_reads_over_a_shared_link_queue_before_their_delay() -> None:
    stage = handoff_stage.Stage(
        decide=lambda attempt: Fate(delay_s=0.5 if attempt.number == 1 else 0.0)
    )
    stage.exchange.bytes_per_s = handoff_stage.BLOCK_BYTES  # a block a second
    landed: list[float] = []

    async def main() -> None:
        mover, clock = await connected(stage), asyncio.get_running_loop().time
        reads = [mover.read(handoff_stage.GRANTER, [n, n + 1], [n, n + 1]) for n in (1, 3, 5)]
        for read in reads:
            read.landed.add_done_callback(lambda _: landed.append(clock()))
        # The first READ has been copied by then, on virtual time.
        await asyncio.sleep(2.25)
        assert reads[0].moved_at == 2.0  # what is left is its delay
        assert reads[1].moved_at == reads[2].moved_at == 2.25  # bytes move
        await asyncio.wait({read.settled for read in reads})

    handoff_stage.on_virtual_time(main)
    assert landed == [2.5, 4.0, 6.0]


def test_a_stuck_read_takes_nothing_of_a_shared_link() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(stuck=attempt.number == 2))
    stage.exchange.bytes_per_s = handoff_stage.BLOCK_BYTES

    async def main() -> None:
        mover = await connected(stage)
        reads = [mover.read(handoff_stage.GRANTER, [n], [n]) for n in (1, 2, 3)]
        assert stage.exchange.stuck == 0  # its turn has not come
        await reads[2].landed
        assert asyncio.get_running_loop().time() == 2.0 and stage.exchange.stuck == 1
        assert reads[1].moved_at == 1.0
        reads[1].abandon()
        assert not reads[1].settled.done()
        stage.exchange.release_stuck()
        assert reads[1].settled.done()

    handoff_stage.on_virtual_time(main)


def test_a_read_waiting_for_a_shared_link_settles_when_abandoned() -> None:
    stage = handoff_stage.Stage()
    stage.exchange.bytes_per_s = handoff_stage.BLOCK_BYTES

    async def main() -> None:
        mover = await connected(stage)
        reads = [mover.read(handoff_stage.GRANTER, [n], [n], [7]) for n in (1, 2, 3)]
        for read in reads[:2]:
            read.abandon()
            read.abandon()
        assert [read.settled.done() for read in reads] == [False, True, False]
        with pytest.raises(ReadFailed, match="abandoned"):
            await checksums_of(reads[1])
        await reads[2].landed
        assert asyncio.get_running_loop().time() == 2.0
        assert reads[0].settled.done()  # its bytes moved: it landed
        await checksums_of(reads[2])

    handoff_stage.on_virtual_time(main)
    assert not stage.own[2].any() and stage.own[3].any()
