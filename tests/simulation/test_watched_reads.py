"""Which READ a handoff that is closed may not leave behind: its own, where it will land."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from baton.kv_transfer.granter import GrantingWorker
from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.kv_transfer.peers import grants
from baton.proto import handoff_pb2
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.world import World
from baton.simulation.invariants.checks import Watch
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop


class Scene:
    """A prefill worker whose handoffs of blocks 0 and 1 end as the test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.world = World(loop, draw(0).config, random.Random(1))
        for name, role in (
            ("p0", "prefill"),
            ("p1", "prefill"),
            ("d0", "decode"),
            ("d1", "decode"),
        ):
            self.world.start_worker(name, role, 16)
        self.watch = Watch(self.world)
        self._number = 0

        async def grant(
            reader: str,
            admit: Callable[[handoff_pb2.OpenHandoff], SimpleNamespace],
            worker: GrantingWorker,
            end: str,
        ) -> SimpleNamespace:
            prompt = admit(handoff_pb2.OpenHandoff(reader_boot_id=self.boot(reader)))
            prompt.on_end(prompt)
            return SimpleNamespace(end=end)

        monkeypatch.setattr(grants, "grant", grant)

    def boot(self, name: str) -> bytes:
        return self.world.workers[name].boot_id

    def read(self, reader: str, *blocks: int, source: str | None = None) -> None:
        self._number += 1
        attempt = Attempt(
            self._number, self.boot(reader), self.boot("p0"), blocks, blocks, checksummed=True
        )
        opening = handoff_pb2.OpenHandoff(handoff_id=b"h", reader_boot_id=self.boot(reader))
        self.watch.leases.fetches(None, opening, list(blocks))
        stale = None if source is None else self.boot(source)
        self.watch.posted(attempt, Fate(stuck=True, stale=stale))

    async def handoff(self, reader: str, end: str) -> None:
        def admit(opening: handoff_pb2.OpenHandoff) -> SimpleNamespace:
            return SimpleNamespace(pinned=[0, 1], on_end=lambda prompt: None)

        module: Any = grants
        with self.watch.watching_grants():
            granting: Any = SimpleNamespace(boot_id=self.boot("p0"))
            await module.grant(reader, admit, granting, end)


def on_loop(monkeypatch: pytest.MonkeyPatch, test: Callable[[Scene], Awaitable[None]]) -> list[str]:
    async def main() -> list[str]:
        scene = Scene(monkeypatch)
        await test(scene)
        return scene.watch.breaches

    return virtual_loop.run(main())


def test_a_read_left_behind_by_its_closed_handoff_is_a_breach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(scene: Scene) -> None:
        scene.read("d0", 1)
        await scene.handoff("d0", "closed")

    assert on_loop(monkeypatch, test) == ["p0: a handoff is closed and d0 reads its blocks still"]


def test_reads_of_others_and_of_other_blocks_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Scene) -> None:
        scene.read("d1", 0, 1)
        scene.read("d0", 2, 3)
        await scene.handoff("d0", "closed")

    assert on_loop(monkeypatch, test) == []


def test_a_late_read_of_an_expired_handoff_accuses_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(scene: Scene) -> None:
        scene.read("d0", 0)
        await scene.handoff("d0", "expired")
        await scene.handoff("d0", "closed")

    assert on_loop(monkeypatch, test) == []


def test_a_read_from_a_pool_that_is_gone_lands_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(scene: Scene) -> None:
        scene.read("d0", 0, source="p1")
        scene.world.kill("p1", silent=False)
        await scene.handoff("d0", "closed")

    assert on_loop(monkeypatch, test) == []
