"""Block events: a snapshot, then deltas without a gap, and a fresh start after falling behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.proto import worker_pb2
from baton.runtime.worker import block_feed
from baton.runtime.worker.block_feed import BlockFeed

BOOT = b"b" * 16


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def following(
    watch: AsyncIterator[worker_pb2.BlockEvents],
) -> worker_pb2.BlockEvents:
    return await asyncio.wait_for(anext(watch), 5)


async def test_a_snapshot_then_deltas() -> None:
    held = {name(1), name(2)}
    feed = BlockFeed(BOOT, lambda: sorted(held))
    feed.publish([name(1), name(2)], [])
    watch = feed.watch()
    first = await following(watch)
    assert (first.snapshot, first.snapshot_end, first.sequence) == (True, True, 1)
    assert first.stored == name(1) + name(2) and first.boot_id == BOOT
    feed.publish([name(3)], [name(1)])
    feed.publish([], [])  # nothing happened: no message
    feed.publish([name(4)], [])
    deltas = [await following(watch) for _ in range(2)]
    assert [d.sequence for d in deltas] == [2, 3]
    assert deltas[0].stored == name(3) and deltas[0].removed == name(1)
    await watch.aclose()


async def test_an_empty_pool_still_sends_a_snapshot() -> None:
    watch = BlockFeed(BOOT, list).watch()
    first = await following(watch)
    assert first.snapshot_end and first.stored == b""
    await watch.aclose()


async def test_a_large_snapshot_comes_in_parts() -> None:
    names = [name(n) for n in range(block_feed.SNAPSHOT_PART + 5)]
    watch = BlockFeed(BOOT, lambda: names).watch()
    parts = [await following(watch) for _ in range(2)]
    assert [p.snapshot_end for p in parts] == [False, True]
    assert b"".join(p.stored for p in parts) == b"".join(names)
    await watch.aclose()


async def test_what_is_published_during_a_snapshot_follows_it() -> None:
    held = [name(1)]
    feed = BlockFeed(BOOT, lambda: held)
    watch = feed.watch()
    first = await following(watch)
    feed.publish([name(2)], [])
    second = await following(watch)
    assert second.sequence == first.sequence + 1
    await watch.aclose()


async def test_a_watcher_that_falls_behind_gets_a_new_snapshot() -> None:
    held: list[bytes] = []
    feed = BlockFeed(BOOT, lambda: held)
    watch = feed.watch()
    await following(watch)
    total = block_feed.EVENT_QUEUE + 10
    for number in range(total):
        held.append(name(number))
        feed.publish([name(number)], [])
    believed: set[bytes] = set()
    while True:
        event = await following(watch)
        if event.snapshot:
            believed = {event.stored[i : i + 16] for i in range(0, len(event.stored), 16)}
            assert event.sequence == total
            break
    assert believed == set(held)
    feed.publish([name(total)], [])
    assert (await following(watch)).sequence == total + 1
    await watch.aclose()


async def test_watchers_do_not_disturb_each_other() -> None:
    feed = BlockFeed(BOOT, list)
    slow, fast = feed.watch(), feed.watch()
    await following(slow)
    await following(fast)
    for number in range(block_feed.EVENT_QUEUE + 5):
        feed.publish([name(number)], [])
        assert (await following(fast)).stored == name(number)
    await slow.aclose()
    await fast.aclose()
