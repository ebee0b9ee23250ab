"""A decode worker that was paused starts no READ of what its handoff no longer pins.

A past bug, by construction: while the reader stands still its lease runs out, the granter unpins,
and offers that arrived before that are the first that the reader takes when it goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.engine.scheduling.blocks import Hold
from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.kv_transfer.reader import HandoffReader
from baton.runtime.config import HandoffConfig
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.history import FINISHED, Ask, History, serve
from baton.simulation.fleet.world import World
from baton.simulation.mutations.patches import Break, applied
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop

pytestmark = pytest.mark.usefixtures("quiet_logs")

LEASE_S = 0.4
PAUSE_S = 2 * LEASE_S
LANDED_S = 0.003  # after a READ of the first chunk; the second one takes 10 ms at least
PROMPT_TOKENS = 90


def _without_the_check(before: Callable[[HandoffReader], None]) -> Callable[[HandoffReader], None]:
    def start_reads(self: HandoffReader) -> None:
        session: Any = self._session
        trusted = session.trusted
        session.trusted = lambda: True
        try:
            before(self)
        finally:
            session.trusted = trusted

    return start_reads


UNCHECKED = Break(
    "a reader does not look at its lease before it starts a READ",
    HandoffReader,
    "_start_reads",
    _without_the_check,
)


class PausedReader:
    """d0 is paused for two leases when the first chunk of its prompt has landed. `unpinned` are the
    READs that it started of blocks which p0 did not pin."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        made = draw(0).config
        config = replace(
            made,
            router=replace(made.router, placement="disaggregated"),
            step=replace(made.step, prefill_tokens=16, chunk_tokens=16),
            handoff=HandoffConfig(lease_s=LEASE_S),
        )
        self.world = World(loop, config, random.Random(1), step_s=0.01)
        self.granter = self.world.start_worker("p0", "prefill", 80)
        self.reader = self.world.start_worker("d0", "decode", 80)
        self.router = self.world.start_router("r0")
        self.world.exchange.decide = self._posted
        self.paused = False
        self.unpinned: list[Attempt] = []

    def _posted(self, attempt: Attempt) -> Fate:
        if not attempt.checksummed:  # a measurement of the pair
            return Fate()
        if not self.paused:
            self.paused = True
            at_s, machine = self.loop.world_s + LANDED_S, self.reader.machine
            self.loop.call_world(at_s, machine.pause)
            self.loop.call_world(at_s + PAUSE_S, machine.resume)
        if not all(self.granter.pool.is_held(block, Hold.PINNED) for block in attempt.remote):
            self.unpinned.append(attempt)
        return Fate()

    async def serve(self) -> History:
        prompt = tuple(range(PROMPT_TOKENS))
        ask = Ask(router="r0", prompt=prompt, max_tokens=4, deadline_s=20.0)
        history = History(ask, 0, asked_s=self.loop.world_s)
        work = serve(self.router, history, lambda: self.loop.world_s)
        await asyncio.wait({self.router.machine.spawn(work, history.request_id)})
        return history


def unpinned_reads() -> list[Attempt]:
    async def main() -> list[Attempt]:
        scene = PausedReader()
        await asyncio.sleep(1.0)
        history = await scene.serve()
        assert history.ends == [FINISHED] and history.ended_s - history.asked_s > PAUSE_S
        return scene.unpinned

    return virtual_loop.run(main())


def test_reader_reads_only_pinned_blocks_after_a_pause() -> None:
    assert unpinned_reads() == []


def test_reader_without_the_check_reads_what_is_not_pinned() -> None:
    with applied(UNCHECKED):
        assert unpinned_reads() != []
