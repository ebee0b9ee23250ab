"""A deliberate break of how a worker ends whose device is lost, as with one of its ranks.

A part of mutations.py, which says what they are for.
"""

from __future__ import annotations

from typing import Any

from baton.engine.scheduling.step_pipeline import StepPipeline
from baton.runtime.errors import DeviceLost, EngineError
from baton.simulation.mutations.patches import Break


def _its_step_alone(before: Any) -> Any:
    async def following(self: StepPipeline[Any]) -> Any:
        try:
            return await before(self)
        except DeviceLost as error:
            return self._take(EngineError(str(error)))

    return following


OF_RANKS: dict[str, Break] = {
    "go-on-without-a-rank": Break(
        "a worker that has lost a rank fails the step alone", StepPipeline, "next", _its_step_alone
    ),
}
