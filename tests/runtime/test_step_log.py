"""The log of a worker's steps: bounded, thinned by time, and without steps that verify."""

from __future__ import annotations

from baton.runtime.config import StepConfig
from baton.runtime.worker.step_log import KEPT, STEP_PAUSE_S, StepLog


def test_a_row_has_the_work_of_the_step() -> None:
    log = StepLog(StepConfig(chunk_tokens=64))
    log.record([(0, 4), (10, 12)], [100, 50], 5.25, 0.25)
    audit = log.audit()
    pairs = (1 + 2 + 3 + 4) + (11 + 12)
    assert audit["recent_steps"] == [(6, pairs, 2, 150, 0.25)]
    assert audit["step_limits"]["chunk_tokens"] == 64


def test_steps_in_quick_succession_are_thinned_by_kind() -> None:
    log = StepLog(StepConfig())
    assert log.due(1.0, chunks=True)
    log.record([(0, 4)], [], 1.0, 0.1)
    assert not log.due(1.0 + STEP_PAUSE_S / 2, chunks=True)
    assert log.due(1.0 + STEP_PAUSE_S / 2, chunks=False)  # the other kind has none yet
    assert log.due(1.0 + 1.01 * STEP_PAUSE_S, chunks=True)


def test_a_step_that_verifies_is_counted_and_left_out() -> None:
    log = StepLog(StepConfig())
    assert not log.due(1.0, chunks=False, verifies=True)
    assert log.audit()["verifying_steps"] == 1


def test_the_log_is_bounded() -> None:
    log = StepLog(StepConfig())
    for number in range(3 * KEPT):
        log.record([(0, 4)] if number % 2 else [], [7], number, 0.01)
    rows = log.audit()["recent_steps"]
    assert len(rows) == 2 * KEPT and {row[0] for row in rows} == {0, 4}


def test_the_last_step_of_each_kind_is_reported_with_its_number() -> None:
    log = StepLog(StepConfig())
    assert log.last(chunks=True) is None
    log.record([(0, 4)], [], 1.0, 0.1)
    log.record([(4, 6)], [9], 2.0, 0.2)
    log.record([], [7, 8], 3.0, 5000.0)
    chunk, step = log.last(chunks=True), log.last(chunks=False)
    assert chunk is not None and step is not None
    assert (chunk.number, chunk.prompt_tokens, chunk.pairs, chunk.sequences) == (2, 2, 11, 1)
    assert (chunk.context_tokens, chunk.micros) == (9, 200_000)
    assert (step.number, step.prompt_tokens, step.context_tokens) == (1, 0, 15)
    assert step.micros == (1 << 32) - 1  # what the message holds
