"""The `Engine` protocol: what the schedulers require of the device."""

from __future__ import annotations

from typing import Protocol

from baton.engine.scheduling.batch import StepBatch, StepHandle
from baton.engine.scheduling.draw_costs import DrawCosts


class Engine(Protocol):
    """Runs steps in the order of submission; `submit` never blocks."""

    @property
    def draw_costs(self) -> DrawCosts:
        """Measured costs of draws; `ZERO_COSTS` where draws take no time."""
        ...

    def compiled_s(self) -> float:
        """Return the seconds spent compiling kernels until now; 0 if nothing is compiled."""
        ...

    def submit(self, batch: StepBatch) -> StepHandle: ...

    async def close(self) -> None: ...
