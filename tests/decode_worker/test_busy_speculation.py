"""What speculation costs a busy worker, in work: searches, and steps that are not planned ahead.

Time is that of a model: a step costs a constant and an amount for each row; one that is not planned
ahead waits for the host, and so does one whose plan searched.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence as Seq
from types import FrameType

import pytest

from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.speculator import Speculator
from baton.decode_worker.step_plan import StepPlan
from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.speculation.yield_gate import CLOSED_STEPS
from baton.runtime import identity
from baton.runtime.config import StepConfig
from tests.support.scripted_request import scripted_request

SIZE = 16
KEY = b"key"
ROOT = identity.root(KEY, "model", "float32")
STEP_S, ROW_S, PAUSE_S, SEARCH_S = 5e-3, 3e-4, 2e-3, 3e-5
WARM_UP_STEPS = 600


class CountedProposer:
    """Proposes what comes next with the chance of one in so many, or nothing at all."""

    name = "ngram"

    def __init__(self, right_every: int | None) -> None:
        self.right_every = right_every
        self.searches = 0
        self.started = 0

    def start(self, tenant: bytes, tokens: Seq[int]) -> CountedProposer:
        self.started += 1
        return self

    def extend(self, tokens: Seq[int]) -> None:
        self._next = tokens[-1] + 1

    def propose(self, limit: int) -> list[int]:
        self.searches += 1
        if self.right_every is None:
            return []
        return [1 if self.searches % self.right_every == 0 else 0] * limit

    def close(self) -> None:
        pass


class BusyWorker:
    """A scheduler in a loop as that of a worker: each step is planned while one runs, if it can
    be. Each token that a step draws is 1."""

    def __init__(self, proposer: CountedProposer, *, speculates: bool = True) -> None:
        self.proposer = proposer
        self.scheduler = DecodeScheduler(
            BlockPool(4096, SIZE),
            StepConfig(local_prefill_tokens=256),
            KEY,
            speculator=Speculator(proposer, 4) if speculates else None,
        )
        self.ahead = self.waited = self.verified = self.verified_with_chunk = 0
        self._arrived = 0
        self._running: StepPlan | None = None

    def submit(self, count: int, *, max_tokens: int = 4000) -> None:
        for _ in range(count):
            self._arrived += 1
            request = scripted_request(
                [self._arrived, 2, 3], at_s=self._arrived, max_tokens=max_tokens, root=ROOT
            )
            self.scheduler.submit(request)

    def step(self) -> None:
        """Plan a step beside the one under way, or after it; commit the older one."""
        searches = self.proposer.searches
        self.scheduler.admit()
        before, plan = self._running, self.scheduler.plan()
        if before is not None:
            self._commit(before)
            if plan:
                self.ahead += 1
            else:
                plan = self.scheduler.plan()
                self.waited += 1
        self._running = plan
        searched_s = SEARCH_S * (self.proposer.searches - searches)
        rows = sum(len(item.tokens) for item in plan.batch.slices)
        self._device_s = STEP_S + ROW_S * rows
        paused = before is not None and not self._fed(plan)
        self._interval_s = self._device_s + PAUSE_S * paused + searched_s
        self.verified += plan.verifies
        self.verified_with_chunk += plan.verifies and bool(plan.chunks)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def _fed(self, plan: StepPlan) -> bool:
        return any(item.feed is not None for item in plan.batch.slices)

    def _commit(self, plan: StepPlan) -> None:
        drawn = []
        for item in plan.batch.slices:
            right = [token == 1 for token in item.tokens[1:]]
            accepted = right.index(False) if False in right else len(right)
            drawn.append(tuple(Drawn(d.choice, 1) for d in item.draws[: accepted + 1]))
        result = StepResult(tuple(drawn), self._device_s, interval_s=self._interval_s)
        outcome = self.scheduler.commit(plan, result)
        tokens = [(sequence, (each,)) for sequence, each in outcome.drawn]
        tokens += [(run.sequence, run.drawn) for run in outcome.runs]
        for sequence, run in tokens:
            sequence.output += [each.token for each in run]
            if len(sequence.output) >= sequence.request.max_tokens:
                self.scheduler.end(sequence)


@pytest.mark.parametrize("right_every", [None, 5])
def test_busy_worker_stops_searching_where_it_does_not_pay(right_every: int | None) -> None:
    """Nothing is found, or one draft of five is right: rows cost as much as they yield."""
    worker = BusyWorker(CountedProposer(right_every))
    worker.submit(64)
    worker.steps(WARM_UP_STEPS)
    assert worker.proposer.searches > 0
    before = worker.proposer.searches, worker.waited
    worker.steps(CLOSED_STEPS)
    assert (worker.proposer.searches, worker.waited) == before


def test_lone_sequence_goes_on_to_speculate() -> None:
    worker = BusyWorker(CountedProposer(1))
    worker.submit(1)
    worker.steps(WARM_UP_STEPS)
    assert worker.verified > 0.9 * WARM_UP_STEPS


def test_arriving_prompts_do_not_wait_for_verification() -> None:
    """Speculation pays, and then a request arrives at each step, which is planned ahead."""
    worker = BusyWorker(CountedProposer(1))
    worker.submit(1)
    worker.steps(100)
    verified, ahead = worker.verified, worker.ahead
    assert verified > 50
    for _ in range(100):
        worker.submit(1, max_tokens=32)
        worker.step()
    assert worker.scheduler.running > 20
    assert worker.verified_with_chunk == 0
    assert worker.ahead - ahead > 95


def test_new_requests_start_nothing_in_an_idle_proposer() -> None:
    worker = BusyWorker(CountedProposer(None))
    worker.submit(64)
    worker.steps(WARM_UP_STEPS)
    started = worker.proposer.started
    worker.submit(8)
    worker.steps(CLOSED_STEPS)
    assert worker.proposer.started == started


def calls_of_features(worker: BusyWorker) -> Counter[str]:
    """Count the calls, in some steps, of functions that speculation and grammars are made of."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and ("/speculat" in file or "/runtime/grammar/" in file):
            calls[file] += 1

    sys.setprofile(count)
    try:
        worker.steps(20)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("speculates", [True, False])
def test_features_that_are_off_run_no_code_in_a_step(speculates: bool) -> None:
    worker = BusyWorker(CountedProposer(1), speculates=speculates)
    worker.submit(8)
    worker.steps(4)
    assert bool(calls_of_features(worker)) == speculates
    assert worker.verified == 0 or speculates
