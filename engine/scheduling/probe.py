"""A probe: one token, computed and drawn by the real engine on a real block, when nothing else is.

    asked, nothing runs, a block is there ─▶ one step ─▶ `failure` empty, or why it did not end well

A worker that computes needs none: its steps show the same. So an idle worker and a busy one are
judged alike, by how their last step ended and by how long the running one takes. Knows no
scheduler and no request. Owned by a worker's loop.
"""

from __future__ import annotations

from baton.engine.scheduling.batch import NOTHING, Draw, Slice, StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.runtime.errors import EngineError
from baton.runtime.sampling import SamplingParams

PROBE_S = 0.5  # between two probes of an idle worker
FIRST_S = 0.05  # between the first two that end well: from two on it is known what one may take
IDLE_TIMES = 8.0  # as long as a probe took it pauses: an idle worker computes for a ninth
FAILURES = 3  # steps and probes in a row that all fail are no accident


class Probe:
    """`failure`: why the last step shows that none could end well; empty if it does not."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._wanted = False
        self._under_way: StepBatch | None = None
        self.failure = ""
        self.failures = 0  # in a row
        self.pause_s = FIRST_S  # to the next probe
        self._ended = 0  # well

    def ask(self) -> None:
        """Probe with the next plan, if nothing runs then."""
        self._wanted = True

    def batch(self) -> StepBatch:
        """The probe that was asked for, or an empty batch. To be called when no step is under
        way, and submitted at once if it is not empty."""
        wanted, self._wanted = self._wanted, False
        if not wanted or not self._pool.available:
            return NOTHING
        blocks = tuple(self._pool.allocate(1, Hold.USED))
        draw = Draw(choice=0, position=1, params=SamplingParams())
        self._under_way = StepBatch((Slice([0], 0, blocks, (draw,)),))
        return self._under_way

    def trouble(self) -> str:
        """Why a step could not end well now, as far as steps and pool show."""
        if self._pool.quarantined >= self._pool.total:
            return "every block of the pool is in quarantine"
        return self.failure

    def failing(self) -> str:
        """What fails again and again; empty while it may be an accident."""
        return self.failure if self.failures >= FAILURES else ""

    def heard(self, batch: StepBatch, outcome: StepResult | EngineError) -> bool:
        """Of every step's end; whether it was a probe's. One request whose numbers are not
        finite says nothing of the worker; a probe's do. A step of which nothing ended well has
        not shown that one could."""
        probing = batch is self._under_way
        if probing:
            self._pool.release(batch.slices[0].blocks, Hold.USED)
            self._under_way = None
        if isinstance(outcome, EngineError):
            self._failed(f"the last step failed: {outcome}")
        elif len(outcome.broken) + len(outcome.failed) < len(batch.slices):
            self._ended_well(outcome, probing)
        elif probing:
            reasons = [f"a probe was not computed: {why}" for why in outcome.failed.values()]
            self._failed((reasons or ["the numbers of a probe are not finite"])[0])
        return probing

    def _ended_well(self, result: StepResult, probing: bool) -> None:
        self.failure, self.failures = "", 0
        if probing:
            self._ended += 1
            later_s = max(PROBE_S, IDLE_TIMES * result.device_s)
            self.pause_s = later_s if self._ended > 1 else FIRST_S
        else:
            self._wanted = False  # this step has shown what a probe would
            self.pause_s = max(PROBE_S, self.pause_s)

    def _failed(self, why: str) -> None:
        """Whoever may be ill has nothing better to do than to be probed."""
        self.failure, self.pause_s = why, PROBE_S
        self.failures += 1
