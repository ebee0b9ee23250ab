"""How a worker's steps fare: what makes it red, and what is to end it, so that it starts anew.

    a step is overdue         red   a hung device ends the worker by DeviceLost, in its own time
    steps and probes fail     red   `failing` once it is no accident: the process ends by and by
    all is in quarantine      red   the process watches the pool by itself
    no block can be moved     red   `failing`: a mover does not come back

Load is none of these. Both kinds of worker have one; their loops tell it of every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.engine.batch import StepBatch, StepResult
from baton.engine.blocks import BlockPool
from baton.engine.probe import Probe
from baton.engine.watermark import Watermark
from baton.runtime.errors import EngineError

OVERDUE_S = 0.8  # a step that should have been over for so long may never be


class StepHealth:
    """`due_s`: when the running step should long be over, as of the step pipeline; `has_work`:
    whether a step ought to run; `moves`: why no block can be moved, empty while one can; `wake`
    makes the loop plan again. Owned by a worker's loop."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        due_s: Callable[[], float | None],
        has_work: Callable[[], bool],
        moves: Callable[[], str],
        wake: Callable[[], None],
    ) -> None:
        self._due_s = due_s
        self._has_work = has_work
        self._moves = moves
        self._wake = wake
        self._probe = Probe(pool)
        self._watermark = Watermark()

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

    @property
    def probe_pause_s(self) -> float:
        """To the next probe."""
        return self._probe.pause_s

    def overdue_s(self) -> float:
        """How long a step is overdue; to be asked often, as with every heartbeat."""
        now_s = asyncio.get_running_loop().time()
        return self._watermark.overdue_s(now_s, due_s=self._due_s(), has_work=self._has_work())

    def trouble(self) -> str:
        """Why no generation could end here now; empty while one could, however long it waits."""
        if (overdue_s := self.overdue_s()) > OVERDUE_S:
            return f"a step is overdue by {overdue_s:.1f} s"
        return self._probe.trouble() or self._moves()

    def failing(self) -> str:
        """What fails again and again, or for good; empty while it may be an accident."""
        return self._probe.failing() or self._moves()
