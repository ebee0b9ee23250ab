"""Each handoff's READs are judged by its own pins, early landings too, and trust by the pins."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from baton.engine.scheduling.blocks import Hold
from baton.kv_transfer.lease import GranterLease, ReaderLease
from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.proto import handoff_pb2
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.world import World
from baton.simulation.invariants.leases import Granted, Leases
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop

MINE, OTHER = b"mine", b"other"


class Scene:
    """A reader, a granter, and a READ of a handoff of the one from the other."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.world = World(loop, draw(0).config, random.Random(1))
        self.granter = self.world.start_worker("p0", "prefill", 16)
        self.reader = self.world.start_worker("d0", "decode", 16)
        self.breaches: list[str] = []
        self.leases = Leases(self.world, self.breaches)
        (self.local,) = self.reader.pool.allocate(1, Hold.LEASED)
        self.mark = (self.reader.boot_id, self.local)
        opening = handoff_pb2.OpenHandoff(handoff_id=MINE, reader_boot_id=self.reader.boot_id)
        self.leases.fetches(None, opening, [self.local])
        self.attempt = Attempt(
            7, self.reader.boot_id, self.granter.boot_id, (3,), (self.local,), True
        )

    def grant(self, handoff: bytes, *pinned: int) -> None:
        prompt: Any = SimpleNamespace(pinned=list(pinned))
        lease = GranterLease(1.0, self.granter.machine.offset_s)
        self.leases.granted[handoff] = Granted(prompt, lease, self.granter.machine)

    def land(self, *, early: bool = False, **fate: Any) -> bool:
        """Whether its block is tainted then."""
        self.leases.posted(self.attempt, Fate(**fate))
        if early:
            settled = asyncio.get_running_loop().create_future()
            read: Any = SimpleNamespace(attempt=self.attempt, _fate=Fate(early=1), settled=settled)
            self.leases.landing_early(read)
        else:
            self.leases.landing(self.attempt)
        return (*self.mark, 0) in self.leases.tainted


def on_loop(test: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        await test(Scene())

    virtual_loop.run(main())


@pytest.mark.parametrize("early", [False, True])
def test_another_handoffs_pin_is_none_of_this_one(early: bool) -> None:
    async def test(scene: Scene) -> None:
        assert scene.land(early=early)  # no worker has granted it
        scene.grant(OTHER, 3)
        scene.grant(MINE, 4)
        assert scene.land(early=early)
        scene.grant(MINE, 3)
        assert scene.land(early=early) is early  # what is early is read once more
        scene.leases.tainted.clear()
        assert not scene.land(early=early) and scene.breaches == []

    on_loop(test)


@pytest.mark.parametrize("early", [False, True])
def test_nothing_lands_in_blocks_that_are_kept_for_none(early: bool) -> None:
    async def test(scene: Scene) -> None:
        scene.grant(MINE, 3)
        scene.reader.pool.release([scene.local], Hold.LEASED)
        scene.land(early=early)
        assert scene.breaches == [
            f"d0: a READ lands in block {scene.local}, which is kept for none"
        ]

    on_loop(test)


def test_nothing_is_read_from_a_process_with_a_dead_boot_id() -> None:
    async def test(scene: Scene) -> None:
        scene.grant(MINE, 3)
        scene.granter.machine.kill()
        assert scene.land(stale=b"another")  # a fault makes it so
        assert scene.breaches == []
        scene.leases.stale_reads.clear()
        assert scene.land()
        assert "under the boot id of the one that is dead" in scene.breaches[0]

    on_loop(test)


@pytest.mark.parametrize(("later_s", "longer"), [(0.0, False), (0.05, False), (0.2, True)])
def test_a_reader_trusts_no_longer_than_its_granter_pins(later_s: float, longer: bool) -> None:
    """The one's 0.9 s by its clock, from when it asked; the other's second by its own."""

    async def test(scene: Scene) -> None:
        scene.grant(MINE, 3)  # for a second, from the world's beginning
        reader = scene.reader.machine
        lease = ReaderLease(1.0)
        lease.renewal(reader.offset_s + later_s * reader.rate)
        lease.acknowledged(0)
        session = Mock(_lease=lease)
        scene.leases.opens(session, handoff_pb2.OpenHandoff(handoff_id=MINE))

        async def check() -> None:
            scene.leases.check_trust(session)

        await reader.spawn(check(), "check")
        assert bool(scene.breaches) is longer
        assert not longer or "longer than p0 keeps it" in scene.breaches[0]

    on_loop(test)
