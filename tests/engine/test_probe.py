"""A probe: when it is a step, what its end says, and that it leaves no block behind."""

from __future__ import annotations

import pytest

from baton.engine.scheduling.batch import Slice, StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.engine.scheduling.step_health import (
    FIRST_PROBE_S,
    PERSISTENT_FAILURES,
    PROBE_S,
    StepHealth,
)
from baton.runtime.errors import EngineError, OutOfMemory
from tests.support.step_health_scene import StepHealthScene

FINE = StepResult(((),))
OTHER = StepBatch((Slice([1], 0, (0,)),))


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(4, 16)


def requested(health: StepHealth) -> StepBatch:
    health.request_probe()
    return health.probe_batch()


async def test_it_is_made_once_when_it_was_asked_for(pool: BlockPool) -> None:
    health = StepHealthScene(pool).health
    assert not health.probe_batch().slices
    batch = requested(health)
    (piece,) = batch.slices
    assert (list(piece.tokens), piece.start, len(piece.draws)) == ([0], 0, 1)
    assert pool.counts().used == 1 and not health.probe_batch().slices
    assert health.record_step(batch, FINE)
    assert pool.counts().used == 0 and health.not_ready_reason() is None
    pool.check()


async def test_without_a_block_there_is_no_probe_and_no_trouble(pool: BlockPool) -> None:
    """A full pool is load, and load is no illness."""
    health = StepHealthScene(pool).health
    pool.allocate(4, Hold.PINNED)
    assert not requested(health).slices and health.not_ready_reason() is None


async def test_a_pool_wholly_in_quarantine_is_trouble(pool: BlockPool) -> None:
    health = StepHealthScene(pool).health
    blocks = pool.allocate(4, Hold.QUARANTINED)
    assert "quarantine" in (health.not_ready_reason() or "")
    pool.release(blocks[:1], Hold.QUARANTINED)
    assert health.not_ready_reason() is None


async def test_a_step_that_fails_is_trouble_until_one_ends_well(pool: BlockPool) -> None:
    health = StepHealthScene(pool).health
    assert not health.record_step(OTHER, EngineError("no device"))
    assert "no device" in (health.not_ready_reason() or "")
    assert health.record_step(requested(health), EngineError("still none"))
    assert "still none" in (health.not_ready_reason() or "") and pool.counts().used == 0
    assert not health.record_step(OTHER, FINE)
    assert health.not_ready_reason() is None


@pytest.mark.parametrize(
    "result",
    [StepResult(((),), broken=frozenset({0})), StepResult(((),), failed={0: OutOfMemory("none")})],
)
async def test_only_a_probes_outcome_counts_for_the_worker(
    pool: BlockPool, result: StepResult
) -> None:
    health = StepHealthScene(pool).health
    assert not health.record_step(OTHER, result)
    assert health.not_ready_reason() is None
    health.record_step(requested(health), result)
    assert health.not_ready_reason() is not None


async def test_another_steps_end_is_not_taken_for_the_probes(pool: BlockPool) -> None:
    """One that is refused while the probe runs: the probe's block is still being written."""
    health = StepHealthScene(pool).health
    batch = requested(health)
    assert not health.record_step(OTHER, EngineError("the queue is full"))
    assert pool.counts().used == 1
    assert health.record_step(batch, FINE) and pool.counts().used == 0


async def test_a_slow_engine_is_probed_seldom(pool: BlockPool) -> None:
    health = StepHealthScene(pool).health
    health.record_step(requested(health), StepResult(((),), device_s=0.001))
    health.record_step(requested(health), StepResult(((),), device_s=0.001))
    assert health.probe_pause_s == PROBE_S
    health.record_step(requested(health), StepResult(((),), device_s=0.8))
    assert health.probe_pause_s == pytest.approx(6.4)


async def test_the_first_two_follow_each_other_unless_a_request_comes(pool: BlockPool) -> None:
    """From two on it is known how long one may take, and a hang is seen."""
    health = StepHealthScene(pool).health
    assert health.probe_pause_s == FIRST_PROBE_S
    health.record_step(requested(health), StepResult(((),), device_s=0.8))
    assert health.probe_pause_s == FIRST_PROBE_S
    health.record_step(OTHER, FINE)
    assert (
        health.probe_pause_s == PROBE_S
    )  # whoever is busy is not woken for it twenty times a second
    health.record_step(requested(health), StepResult(((),), device_s=0.001))
    assert health.probe_pause_s == PROBE_S


async def test_repeated_failures_are_distinguished_from_an_accident(pool: BlockPool) -> None:
    health = StepHealthScene(pool).health
    for _ in range(PERSISTENT_FAILURES - 1):
        health.record_step(requested(health), EngineError("no device"))
        assert health.persistent_failure() is None
    health.record_step(OTHER, EngineError("no device at all"))
    assert "no device at all" in (health.persistent_failure() or "")
    health.record_step(requested(health), FINE)
    assert health.persistent_failure() is None
    health.record_step(OTHER, EngineError("no device"))
    assert health.persistent_failure() is None  # they count in a row


async def test_a_step_of_which_nothing_ended_well_shows_nothing(pool: BlockPool) -> None:
    """Else a worker that computes nothing but broken numbers would look well while it is busy."""
    health = StepHealthScene(pool).health
    for _ in range(PERSISTENT_FAILURES):
        health.record_step(requested(health), StepResult(((),), broken=frozenset({0})))
    health.request_probe()
    health.record_step(OTHER, StepResult(((),), broken=frozenset({0})))
    assert (
        "not finite" in (health.persistent_failure() or "") and health.probe_batch().slices
    )  # still wanted
    two = StepBatch((Slice([1], 0, (0,)), Slice([1], 0, (1,))))
    health.record_step(two, StepResult(((), ()), broken=frozenset({0})))
    assert health.not_ready_reason() is None


async def test_an_ill_worker_is_probed_often_however_slow_it_is(pool: BlockPool) -> None:
    health = StepHealthScene(pool).health
    health.record_step(requested(health), StepResult(((),), device_s=0.8))
    health.record_step(OTHER, EngineError("no device"))
    assert health.probe_pause_s == PROBE_S
