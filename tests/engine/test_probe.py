"""A probe: when it is a step, what its end says, and that it leaves no block behind."""

from __future__ import annotations

import pytest

from baton.engine.scheduling.batch import Slice, StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.engine.scheduling.probe import FAILURES, FIRST_S, PROBE_S, Probe
from baton.runtime.errors import EngineError, OutOfMemory

FINE = StepResult(((),))
OTHER = StepBatch((Slice([1], 0, (0,)),))


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(4, 16)


def asked(probe: Probe) -> StepBatch:
    probe.ask()
    return probe.batch()


def test_it_is_made_once_when_it_was_asked_for(pool: BlockPool) -> None:
    probe = Probe(pool)
    assert not probe.batch().slices
    batch = asked(probe)
    (piece,) = batch.slices
    assert (list(piece.tokens), piece.start, len(piece.draws)) == ([0], 0, 1)
    assert pool.counts().used == 1 and not probe.batch().slices
    assert probe.heard(batch, FINE)
    assert pool.counts().used == 0 and probe.trouble() == ""
    pool.check()


def test_without_a_block_there_is_no_probe_and_no_trouble(pool: BlockPool) -> None:
    """A full pool is load, and load is no illness."""
    probe = Probe(pool)
    pool.allocate(4, Hold.PINNED)
    assert not asked(probe).slices and probe.trouble() == ""


def test_a_pool_wholly_in_quarantine_is_trouble(pool: BlockPool) -> None:
    probe = Probe(pool)
    blocks = pool.allocate(4, Hold.QUARANTINED)
    assert "quarantine" in probe.trouble()
    pool.release(blocks[:1], Hold.QUARANTINED)
    assert probe.trouble() == ""


def test_a_step_that_fails_is_trouble_until_one_ends_well(pool: BlockPool) -> None:
    probe = Probe(pool)
    assert not probe.heard(OTHER, EngineError("no device"))
    assert "no device" in probe.trouble()
    assert probe.heard(asked(probe), EngineError("still none"))
    assert "still none" in probe.trouble() and pool.counts().used == 0
    assert not probe.heard(OTHER, FINE)
    assert probe.trouble() == ""


@pytest.mark.parametrize(
    "result",
    [StepResult(((),), broken=frozenset({0})), StepResult(((),), failed={0: OutOfMemory("none")})],
)
def test_what_one_request_does_is_its_own_and_what_a_probe_does_is_the_workers(
    pool: BlockPool, result: StepResult
) -> None:
    probe = Probe(pool)
    assert not probe.heard(OTHER, result)
    assert probe.trouble() == ""
    probe.heard(asked(probe), result)
    assert probe.trouble() != ""


def test_another_steps_end_is_not_taken_for_the_probes(pool: BlockPool) -> None:
    """One that is refused while the probe runs: the probe's block is still being written."""
    probe = Probe(pool)
    batch = asked(probe)
    assert not probe.heard(OTHER, EngineError("the queue is full"))
    assert pool.counts().used == 1
    assert probe.heard(batch, FINE) and pool.counts().used == 0


def test_a_slow_engine_is_probed_seldom(pool: BlockPool) -> None:
    probe = Probe(pool)
    probe.heard(asked(probe), StepResult(((),), device_s=0.001))
    probe.heard(asked(probe), StepResult(((),), device_s=0.001))
    assert probe.pause_s == PROBE_S
    probe.heard(asked(probe), StepResult(((),), device_s=0.8))
    assert probe.pause_s == pytest.approx(6.4)


def test_the_first_two_follow_each_other_unless_a_request_comes(pool: BlockPool) -> None:
    """From two on it is known how long one may take, and a hang is seen."""
    probe = Probe(pool)
    assert probe.pause_s == FIRST_S
    probe.heard(asked(probe), StepResult(((),), device_s=0.8))
    assert probe.pause_s == FIRST_S
    probe.heard(OTHER, FINE)
    assert probe.pause_s == PROBE_S  # whoever is busy is not woken for it twenty times a second
    probe.heard(asked(probe), StepResult(((),), device_s=0.001))
    assert probe.pause_s == PROBE_S


def test_what_fails_again_and_again_is_told_apart_from_an_accident(pool: BlockPool) -> None:
    probe = Probe(pool)
    for _ in range(FAILURES - 1):
        probe.heard(asked(probe), EngineError("no device"))
        assert probe.failing() == ""
    probe.heard(OTHER, EngineError("no device at all"))
    assert "no device at all" in probe.failing()
    probe.heard(asked(probe), FINE)
    assert probe.failing() == ""
    probe.heard(OTHER, EngineError("no device"))
    assert probe.failing() == ""  # they count in a row


def test_a_step_of_which_nothing_ended_well_shows_nothing(pool: BlockPool) -> None:
    """Else a worker that computes nothing but broken numbers would look well while it is busy."""
    probe = Probe(pool)
    for _ in range(FAILURES):
        probe.heard(asked(probe), StepResult(((),), broken=frozenset({0})))
    probe.ask()
    probe.heard(OTHER, StepResult(((),), broken=frozenset({0})))
    assert "not finite" in probe.failing() and probe.batch().slices  # still wanted
    two = StepBatch((Slice([1], 0, (0,)), Slice([1], 0, (1,))))
    probe.heard(two, StepResult(((), ()), broken=frozenset({0})))
    assert probe.trouble() == ""


def test_an_ill_worker_is_probed_often_however_slow_it_is(pool: BlockPool) -> None:
    probe = Probe(pool)
    probe.heard(asked(probe), StepResult(((),), device_s=0.8))
    probe.heard(OTHER, EngineError("no device"))
    assert probe.pause_s == PROBE_S
