"""The registry of simulated processes: open calls while it is held, failures while it fails."""

from __future__ import annotations

import asyncio

import pytest

from baton.runtime import logs
from baton.runtime.registry import MemoryRegistry, WorkerRecord
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import REGISTRY_EVERY, REGISTRY_SEED, draw
from baton.simulation.fleet.scenario import Fault
from baton.simulation.virtual.held_registry import HeldRegistry

RECORD = WorkerRecord("d0", "00" * 16, "decode", "127.0.0.1:1", "", "hash", 1)


async def test_calls_stay_open_until_the_last_hold_ends() -> None:
    registry = MemoryRegistry()
    held = HeldRegistry(registry)
    held.hold()
    held.hold()
    reading = held.workers()
    held.release()
    await asyncio.sleep(0)
    assert not reading.done()
    registry.announce(RECORD)
    held.release()
    assert await reading == [RECORD]
    assert held.workers().done()


async def test_a_call_without_a_waiter_is_not_answered() -> None:
    held = HeldRegistry(MemoryRegistry())
    held.hold()
    held.workers().cancel()
    announcing = held.announce(RECORD)
    held.release()
    await announcing
    assert await held.workers() == [RECORD]


async def test_each_call_fails_while_it_cannot_be_read() -> None:
    held = HeldRegistry(MemoryRegistry())
    held.fail()
    with pytest.raises(OSError, match="no descriptor"):
        await held.workers()
    held.recover()
    assert await held.workers() == []


def test_a_fleet_serves_all_while_its_registry_hangs() -> None:
    logs.setup("lab", "critical")
    seeds = range(REGISTRY_SEED, 10 * REGISTRY_EVERY, REGISTRY_EVERY)
    faults = [event.does for seed in seeds for event in draw(seed).faults]
    kinds = {fault.what for fault in faults if isinstance(fault, Fault)}
    assert {"hangs", "cannot be read"} <= kinds
    for seed in seeds:
        outcome = lab.run(draw(seed))
        assert outcome.breaches == []
        assert not outcome.void
