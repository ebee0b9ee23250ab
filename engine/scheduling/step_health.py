"""How a worker's steps fare: what makes it red, and what is to end it, so that it starts anew.

    a step is overdue         red   a hung device ends the worker by DeviceLost, in its own time
    steps and probes fail     red   `failing` once it is no accident: the process ends by and by
    all is in quarantine      red   the process watches the pool by itself
    no block can be moved     red   `failing`: a mover does not come back

Load is none of these; nor is it a step's fault that its process stood still. Both kinds of worker
have one; their loops tell it of every step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from baton.engine.scheduling.batch import StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.scheduling.probe import PROBE_S, Probe
from baton.engine.scheduling.watermark import Watermark
from baton.runtime.errors import EngineError

OVERDUE_S = 0.8  # a step that should have been over for so long may never be
LATE_S = 0.5  # a timer may be on a busy machine; one that is later shows a process that stood still


class Steps(Protocol):
    """As the step pipeline: when the running step should long be over, and what it is told."""

    def due_s(self) -> float | None: ...

    def stood_still(self, seconds: float) -> None: ...


class StepHealth:
    """`has_work`: whether a step ought to run; `moves`: why no block can be moved, empty while one
    can; `wake` makes the loop plan again. Owned by a worker's loop."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        steps: Steps,
        has_work: Callable[[], bool],
        moves: Callable[[], str],
        wake: Callable[[], None],
    ) -> None:
        self._steps = steps
        self._has_work = has_work
        self._moves = moves
        self._wake = wake
        self._probe = Probe(pool)
        self._watermark = Watermark()
        self._awake_s = math.inf  # when the sleep under way should end

    # -- what the worker's loop tells ---------------------------------------------------------

    def probe_batch(self) -> StepBatch:
        """As `Probe.batch`."""
        return self._probe.batch()

    def heard(self, batch: StepBatch, outcome: StepResult | EngineError) -> bool:
        """As `Probe.heard`."""
        return self._probe.heard(batch, outcome)

    # -- what others ask ----------------------------------------------------------------------

    def probe(self) -> None:
        """Show by a step whether one could end well, if no step shows it now."""
        self._probe.ask()
        self._wake()

    async def watch(self) -> None:
        """Probe, as long as the worker serves; in between, see whether its process stands still:
        then a sleep is late. What happened in the middle of one is not seen."""
        now_s = asyncio.get_running_loop().time
        try:
            while True:
                self.probe()
                probed_s = now_s()
                while (left_s := probed_s + self._probe.pause_s - now_s()) > 0:
                    self._awake_s = now_s() + min(left_s, PROBE_S)
                    await asyncio.sleep(min(left_s, PROBE_S))
                    self._stood_still(self._late_s())
        finally:
            self._awake_s = math.inf

    def overdue_s(self) -> float:
        """How long a step is overdue; to be asked often, as with every heartbeat."""
        return max(0.0, self._past_due_s())

    def red_in_s(self) -> float:
        """Until a step has been overdue for so long that it is trouble, if none ends; at most 0
        where it is, infinitely long where there is none."""
        return OVERDUE_S - self._past_due_s()

    def trouble(self) -> str:
        """Why no generation could end here now; empty while one could, however long it waits."""
        if (overdue_s := self.overdue_s()) >= OVERDUE_S:
            return f"a step is overdue by {overdue_s:.1f} s"
        return self._probe.trouble() or self._moves()

    def failing(self) -> str:
        """What fails again and again, or for good; empty while it may be an accident."""
        return self._probe.failing() or self._moves()

    # -- the clock ----------------------------------------------------------------------------

    def _past_due_s(self) -> float:
        """As of the moment from which this process stands still, if it did until just now."""
        now_s = asyncio.get_running_loop().time() - self._late_s()
        due_s, has_work = self._steps.due_s(), self._has_work()
        return self._watermark.past_due_s(now_s, due_s=due_s, has_work=has_work)

    def _late_s(self) -> float:
        late_s = asyncio.get_running_loop().time() - self._awake_s
        return late_s if late_s > LATE_S else 0.0

    def _stood_still(self, seconds: float) -> None:
        self._awake_s = math.inf
        self._steps.stood_still(seconds)
        self._watermark.stood_still(seconds)
