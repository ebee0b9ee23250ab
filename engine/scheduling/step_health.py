"""The health of a worker's steps: why it is not ready, and which failures end its process.

    a step is overdue         not ready   DeviceLost ends the worker when its device hangs
    steps and probes fail     not ready   a persistent failure ends the process
    all is in quarantine      not ready   the process watches the pool by itself
    no block can be moved     not ready   a persistent failure: a mover does not recover

Load does not count, nor does time in which the process itself was stopped. An idle worker runs
probes: the engine computes and draws one token on a block of the pool. A worker's loop owns this
object and records every step in it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from baton.engine.scheduling.batch import EMPTY_BATCH, Draw, Slice, StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.runtime.errors import EngineError
from baton.runtime.sampling import SamplingParams

OVERDUE_S = 0.8  # a step overdue for so long may never end
LATE_S = 0.5  # a later timer shows that the process was stopped
PROBE_S = 0.5  # between two probes of an idle worker
FIRST_PROBE_S = 0.05  # between the first two successful probes, which measure a probe
PROBE_PAUSE_FACTOR = 8.0  # pause per time of a probe: an idle worker computes 1/9 of the time
PERSISTENT_FAILURES = 3  # consecutive steps and probes that all fail


class StepClock(Protocol):
    """The times of the running step, as `StepPipeline` knows them."""

    def due_s(self) -> float | None: ...

    def record_stall(self, seconds: float) -> None: ...


class StepHealth:
    """The health of one worker. `has_work`: whether a step should run; `mover_failure`: why no
    block can be read, None while one can; `wake` makes the loop plan again."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        steps: StepClock,
        has_work: Callable[[], bool],
        mover_failure: Callable[[], str | None],
        wake: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._steps = steps
        self._has_work = has_work
        self._mover_failure = mover_failure
        self._wake = wake
        self._probe_wanted = False
        self._probe: StepBatch | None = None  # under way
        self._good_probes = 0
        self.probe_pause_s = FIRST_PROBE_S  # to the next probe
        self._failure: str | None = None  # of the last step, if it shows that none could succeed
        self._failures = 0  # consecutive
        self._unplanned_since_s: float | None = None  # work is here, and no step runs
        self._awake_s = math.inf  # when the sleep under way should end

    # -- reports of the worker's loop ---------------------------------------------------------

    def probe_batch(self) -> StepBatch:
        """Return a requested probe, or an empty batch. To be called when no step is under way,
        and submitted at once if it is not empty."""
        wanted, self._probe_wanted = self._probe_wanted, False
        if not wanted or not self._pool.available:
            return EMPTY_BATCH
        self._probe = probe_batch(self._pool.allocate(1, Hold.USED)[0])
        return self._probe

    def record_step(self, batch: StepBatch, outcome: StepResult | EngineError) -> bool:
        """Record the end of a step; return whether it was a probe. Non-finite numbers in a request
        do not count against the worker; in a probe they do. A step without a successful slice
        proves nothing."""
        is_probe = batch is self._probe
        if is_probe:
            self._pool.release(batch.slices[0].blocks, Hold.USED)
            self._probe = None
        if isinstance(outcome, EngineError):
            self._record_failure(f"the last step failed: {outcome}")
        elif len(outcome.broken) + len(outcome.failed) < len(batch.slices):
            self._record_success(outcome, is_probe)
        elif is_probe:
            self._record_failure(probe_failure(outcome) or "")
        return is_probe

    # -- state for other components -----------------------------------------------------------

    def request_probe(self) -> None:
        """Let the loop compute a probe, unless another step shows the same before."""
        self._probe_wanted = True
        self._wake()

    async def watch(self) -> None:
        """Request probes while the worker serves. A late timer between two probes shows that the
        process was stopped; a stop in the middle of a step is not detected."""
        now_s = asyncio.get_running_loop().time
        try:
            while True:
                self.request_probe()
                probed_s = now_s()
                while (left_s := probed_s + self.probe_pause_s - now_s()) > 0:
                    self._awake_s = now_s() + min(left_s, PROBE_S)
                    # The next probe is due later; short pauses show a stop of this process.
                    await asyncio.sleep(min(left_s, PROBE_S))
                    self._exclude_stall(self._late_s())
        finally:
            self._awake_s = math.inf

    def overdue_s(self) -> float:
        """Return how long a step is overdue; to be called often, as with every heartbeat."""
        return max(0.0, self._past_due_s())

    def red_in_s(self) -> float:
        """Return the time until the running step makes the worker not ready, if it does not end:
        at most 0 once it has, infinite where no step is due."""
        return OVERDUE_S - self._past_due_s()

    def not_ready_reason(self) -> str | None:
        """Return why no request could be completed now; None if one could, however long it
        waits."""
        if (overdue_s := self.overdue_s()) >= OVERDUE_S:
            return f"a step is overdue by {overdue_s:.1f} s"
        if self._pool.quarantined >= self._pool.total:
            return "every block of the pool is in quarantine"
        return self._failure or self._mover_failure()

    def persistent_failure(self) -> str | None:
        """Return a failure that does not pass: of several steps in a row, or of the mover."""
        if self._failures >= PERSISTENT_FAILURES:
            return self._failure
        return self._mover_failure()

    # -- probes -------------------------------------------------------------------------------

    def _record_success(self, result: StepResult, is_probe: bool) -> None:
        self._failure, self._failures = None, 0
        if is_probe:
            self._good_probes += 1
            later_s = max(PROBE_S, PROBE_PAUSE_FACTOR * result.device_s)
            self.probe_pause_s = later_s if self._good_probes > 1 else FIRST_PROBE_S
        else:
            self._probe_wanted = False  # this step shows the same as a probe
            self.probe_pause_s = max(PROBE_S, self.probe_pause_s)

    def _record_failure(self, reason: str) -> None:
        self._failure, self.probe_pause_s = reason, PROBE_S
        self._failures += 1

    # -- the clock ----------------------------------------------------------------------------

    def _past_due_s(self) -> float:
        """Return the seconds since the running step should have ended, or since work was first
        seen without a step; below 0 before that, minus infinity where nothing is due. A stall of
        this process that lasted until now is left out."""
        now_s = asyncio.get_running_loop().time() - self._late_s()
        due_s = self._steps.due_s()
        if due_s is not None or not self._has_work():
            self._unplanned_since_s = None
            return now_s - due_s if due_s is not None else -math.inf
        if self._unplanned_since_s is None:
            self._unplanned_since_s = now_s
        return now_s - self._unplanned_since_s

    def _late_s(self) -> float:
        late_s = asyncio.get_running_loop().time() - self._awake_s
        return late_s if late_s > LATE_S else 0.0

    def _exclude_stall(self, seconds: float) -> None:
        self._awake_s = math.inf
        self._steps.record_stall(seconds)
        if self._unplanned_since_s is not None:
            self._unplanned_since_s += seconds


def probe_batch(block: int) -> StepBatch:
    """Return a step that computes and draws one token on this block."""
    draw = Draw(choice=0, position=1, params=SamplingParams())
    return StepBatch((Slice([0], 0, (block,), (draw,)),))


def probe_failure(result: StepResult) -> str | None:
    """Return why a probe did not succeed; None if it did."""
    if result.failed:
        return f"a probe was not computed: {next(iter(result.failed.values()))}"
    return "the numbers of a probe are not finite" if result.broken else None
