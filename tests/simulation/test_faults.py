"""What strikes, strikes as it says, and is over after its time. On virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from baton.kv_transfer.checksum import block_seed
from baton.kv_transfer.memory_mover import Attempt
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.engine_kind import SLABS, PlainSums
from baton.simulation.fleet.faults import Striker
from baton.simulation.fleet.scenario import BLOCK, Fault
from baton.simulation.fleet.world import World
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop


class Scene:
    """A router, two prefill workers and a decode worker, linked, and what strikes them."""

    def __init__(self, *, own_fabric: bool = False, one_sided: bool = True) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        config = draw(0).config
        config = replace(config, worker=replace(config.worker, drain_s=0.5))
        self.world = World(loop, config, random.Random(1))
        self.striker = Striker(
            self.world, random.Random(2), 0.01, one_sided=one_sided, own_fabric=own_fabric
        )
        for name in ("p0", "p1"):
            self.world.start_worker(name, "prefill", 16)
        self.world.start_worker("d0", "decode", 16)
        self.world.start_router("r0")

    def linked(self) -> dict[str, int]:
        return self.world.routers["r0"].fleet.linked_counts()

    def attempt(self, blocks: int = 2) -> Attempt:
        workers = self.world.workers
        indices = tuple(range(blocks))
        return Attempt(1, workers["d0"].boot_id, workers["p0"].boot_id, indices, indices, True)

    def fate(self) -> object:
        return self.world.exchange.decide(self.attempt())


def on_loop(test: Callable[[Scene], Awaitable[None]], **how: bool) -> None:
    async def main() -> None:
        scene = Scene(**how)
        await asyncio.sleep(1)
        await test(scene)

    virtual_loop.run(main())


@pytest.mark.parametrize("what", ["", "silently"])
def test_a_killed_worker_returns_with_its_name_and_another_boot(what: str) -> None:
    async def test(scene: Scene) -> None:
        before = scene.world.workers["d0"]
        assert scene.linked() == {"prefill": 2, "decode": 1}
        scene.striker.strike(Fault("kill", ("d0",), 3.0, what))
        assert not before.machine.alive and scene.striker.lasting
        await asyncio.sleep(2)
        assert scene.linked() == {"prefill": 2, "decode": 0}
        await asyncio.sleep(4)
        after = scene.world.workers["d0"]
        assert after.boot_id != before.boot_id and after.machine.alive
        assert scene.linked() == {"prefill": 2, "decode": 1} and not scene.striker.lasting
        assert scene.world.of_boot(before.boot_id) is before

    on_loop(test)


def test_a_paused_worker_falls_silent_and_comes_back_as_itself() -> None:
    async def test(scene: Scene) -> None:
        boot_id = scene.world.workers["d0"].boot_id
        scene.striker.strike(Fault("pause", ("d0",), 4.0))
        await asyncio.sleep(3)
        assert scene.linked()["decode"] == 0
        await asyncio.sleep(5)
        assert scene.linked()["decode"] == 1
        assert scene.world.workers["d0"].boot_id == boot_id

    on_loop(test)


def test_a_drained_worker_is_replaced_once_it_owes_nothing() -> None:
    async def test(scene: Scene) -> None:
        before = scene.world.workers["p0"]
        scene.striker.strike(Fault("drain", ("p0",), 1.0))
        await asyncio.sleep(5)
        after = scene.world.workers["p0"]
        assert before.task.done() and after.boot_id != before.boot_id
        assert scene.linked() == {"prefill": 2, "decode": 1}

    on_loop(test)


def test_a_worker_takes_on_the_other_role_and_then_its_own_again() -> None:
    async def test(scene: Scene) -> None:
        before = scene.world.workers["p0"]
        scene.striker.strike(Fault("role", ("p0",), 6.0))
        await asyncio.sleep(4)
        other = scene.world.workers["p0"]
        assert other.role == "decode" and other.boot_id != before.boot_id
        assert scene.linked() == {"prefill": 1, "decode": 2} and scene.striker.lasting
        await asyncio.sleep(6)
        assert scene.world.workers["p0"].role == "prefill" and not scene.striker.lasting
        assert scene.linked() == {"prefill": 2, "decode": 1}

    on_loop(test)


def test_a_worker_ordered_to_change_role_twice_ends_in_its_first() -> None:
    async def test(scene: Scene, apart_s: float) -> None:
        scene.striker.strike(Fault("role", ("p0",), 6.0))
        await asyncio.sleep(apart_s)
        scene.striker.strike(Fault("role", ("p0",), 2.0))
        await asyncio.sleep(12)
        assert scene.world.workers["p0"].role == "prefill" and not scene.striker.lasting
        assert scene.linked() == {"prefill": 2, "decode": 1}

    on_loop(partial(test, apart_s=0.1))
    on_loop(partial(test, apart_s=4.0))  # it has the other one by then


def test_what_a_slow_machine_has_sent_is_late_after_it_too() -> None:
    async def test(scene: Scene) -> None:
        began_s, share = scene.world.loop.world_s, 2.0 / scene.world.delay_s
        scene.striker.strike(Fault("slow", ("p0",), 1.0, share=share))
        scene.striker.strike(Fault("slow", ("p1",), 1.5))
        await asyncio.sleep(2)
        assert scene.striker.over_s == pytest.approx(began_s + 3.0, abs=0.01)

    on_loop(test)


def test_a_worker_that_dies_in_another_role_returns_in_its_next() -> None:
    async def test(scene: Scene) -> None:
        scene.striker.strike(Fault("role", ("p0",), 5.0))
        await asyncio.sleep(3)
        scene.striker.strike(Fault("kill", ("p0",), 4.0))
        await asyncio.sleep(8)
        assert scene.world.workers["p0"].role == "prefill"
        assert scene.linked() == {"prefill": 2, "decode": 1}

    on_loop(test)


def test_a_cut_stops_all_reads_without_a_fabric_of_their_own() -> None:
    async def stuck(scene: Scene) -> None:
        scene.striker.strike(Fault("cut", ("d0", "p0"), 1.0, "one way"))
        assert scene.fate().stuck
        await asyncio.sleep(1.5)
        assert not scene.fate().stuck

    async def through(scene: Scene) -> None:
        scene.striker.strike(Fault("cut", ("d0", "p0"), 1.0, "both"))
        assert not scene.fate().stuck

    on_loop(stuck)
    on_loop(through, own_fabric=True)


def test_a_paused_granter_is_read_where_reads_are_one_sided() -> None:
    async def test(scene: Scene, *, one_sided: bool) -> None:
        scene.striker.strike(Fault("pause", ("p0",), 1.0))
        assert scene.fate().stuck is not one_sided

    for one_sided in (True, False):
        on_loop(lambda scene, o=one_sided: test(scene, one_sided=o), one_sided=one_sided)


@pytest.mark.parametrize("what", ["failed", "stuck", "corrupt", "short", "wrong", "stale"])
def test_reads_of_a_spoilt_worker_share_its_fate_until_it_ends(what: str) -> None:
    async def test(scene: Scene) -> None:
        usual = scene.fate()
        scene.striker.strike(Fault("reads", ("p0",), 1.0, what, share=1.0))
        spoilt = getattr(scene.fate(), what)
        assert spoilt is not None and spoilt is not False
        if what == "stale":
            assert spoilt == scene.world.workers["p1"].boot_id
        await asyncio.sleep(1.5)
        for name in ("failed", "stuck", "corrupt", "short", "wrong", "stale"):
            assert getattr(scene.fate(), name) == getattr(usual, name)

    on_loop(test)


def test_a_flipped_bit_may_be_any_of_a_block() -> None:
    async def test(scene: Scene) -> None:
        scene.striker.strike(Fault("reads", ("p0",), 1.0, "corrupt"))
        bits = [scene.fate().bit for _ in range(500)]
        size = 8 * scene.world.kind.block_bytes(BLOCK)
        assert min(bits) < size // 50 and size - size // 50 < max(bits) < size

    on_loop(test)


def test_healing_ends_all_at_once() -> None:
    async def test(scene: Scene) -> None:
        scene.striker.strike(Fault("pause", ("p0",), 100.0))
        scene.striker.strike(Fault("cut", ("r0", "d0"), 100.0, "both"))
        scene.striker.strike(Fault("kill", ("p1",), 100.0))
        await asyncio.sleep(5)
        assert scene.linked() == {"prefill": 0, "decode": 0}
        scene.striker.heal()
        await asyncio.sleep(8)
        assert scene.linked() == {"prefill": 2, "decode": 1} and not scene.striker.lasting

    on_loop(test)


def test_plain_sums_tell_bytes_blocks_and_seeds_apart() -> None:
    array = np.random.default_rng(0).integers(0, 256, (4, 64), dtype=np.uint8)
    pool = PlainSums(array, SLABS)
    seeds = [block_seed(b"boot" * 4, block, b"tag") for block in range(4)]
    sums = pool.checksums(range(4), seeds)
    assert sums.shape == (4, SLABS) and (pool.checksums(range(4), seeds) == sums).all()
    assert len({int(one) for one in sums.ravel()}) == 4 * SLABS
    array[2, 0] ^= 1
    changed = pool.checksums(range(4), seeds) != sums
    assert changed.tolist() == [[False] * SLABS, [False] * SLABS, [True, False], [False] * SLABS]
    for other in (seeds[1] ^ 1, seeds[1] ^ (1 << 63)):
        assert (pool.checksums([1], [other]) != sums[1]).all()
