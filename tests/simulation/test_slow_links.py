"""READs that share a slow link: drawn, waited for, and no worker's failure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from baton.kv_transfer.memory_mover import MemoryExchange, MemoryRead
from baton.kv_transfer.reader import HandoffReader
from baton.runtime.errors import ReadFailed
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import CONTACT_BLOCKS, LINK_EVERY, LINK_S, LINK_SEED, draw
from baton.simulation.fleet.scenario import READ_BLOCKS, Fault
from baton.simulation.mutations import patches
from baton.simulation.mutations.patches import Break

pytestmark = pytest.mark.usefixtures("quiet_logs")

LINKED = range(LINK_SEED, 30 * LINK_EVERY, LINK_EVERY)


def test_in_some_seeds_reads_share_a_link_of_drawn_speed() -> None:
    linked = [seed for seed in range(120) if draw(seed).blocks_per_s is not None]
    assert linked == list(LINKED)
    within = set()
    for seed in LINKED:
        made = draw(seed)
        assert made == draw(seed) and made.blocks_per_s is not None
        pairs = len(made.prefill) * len(made.decode)
        within.add(round(CONTACT_BLOCKS * pairs / made.blocks_per_s, 6))
    assert within == set(LINK_S)


def test_a_stopping_worker_may_wait_for_one_read_on_the_link() -> None:
    made = draw(LINK_SEED)
    assert made.blocks_per_s is not None
    alone = replace(made, blocks_per_s=None)
    assert made.stops_s["decode"] == alone.stops_s["decode"]
    more_s = made.stops_s["prefill"] - alone.stops_s["prefill"]
    assert more_s == pytest.approx(READ_BLOCKS / made.blocks_per_s)


def test_reads_wait_for_each_other_there_and_nothing_fails() -> None:
    longest = dict.fromkeys((True, False), 0)

    def watched(before: Callable[..., None]) -> Callable[..., None]:
        def begin(self: MemoryExchange, read: MemoryRead) -> None:
            before(self, read)
            longest[is_linked] = max(longest[is_linked], len(self._waiting))

        return begin

    watching = Break("", MemoryExchange, "begin", watched)
    for seed in LINKED[::3]:  # the lab's seeds run them all
        for is_linked in (True, False):
            made = draw(seed) if is_linked else replace(draw(seed), blocks_per_s=None)
            assert lab.run(made, lambda: patches.applied(watching)).breaches == []
    assert longest[True] > 4 and longest[False] == 0


def failing_reads(before: object) -> Callable[..., Awaitable[None]]:
    async def landing(self: HandoffReader, read: MemoryRead) -> None:
        raise ReadFailed("for no reason")

    return landing


def test_a_read_that_fails_without_a_fault_is_seen() -> None:
    broken = Break("", HandoffReader, "_await_landing", failing_reads)
    breaches = lab.run(draw(LINK_SEED), lambda: patches.applied(broken)).breaches
    words = "which nothing has befallen, failed: ReadFailed: for no reason"
    assert any(words in breach for breach in breaches)


def test_one_that_was_failed_is_no_breach() -> None:
    """As it is drawn: by a fault that spoils all READs from a granter."""
    spoiled = [
        seed
        for seed in range(300)
        for event in draw(seed).faults
        if isinstance(event.does, Fault) and event.does.what == "failed" and event.does.share == 1.0
    ]
    failed = 0

    def counted(before: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def landing(self: HandoffReader, read: MemoryRead) -> None:
            nonlocal failed
            try:
                await before(self, read)
            except ReadFailed:
                failed += 1
                raise

        return landing

    watching = Break("", HandoffReader, "_await_landing", counted)
    for seed in spoiled[:8]:
        assert lab.run(draw(seed), lambda: patches.applied(watching)).breaches == []
    assert failed > 3
