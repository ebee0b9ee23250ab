"""A decode scheduler with its pool, planned and committed one step at a time."""

from __future__ import annotations

from collections.abc import Mapping

from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group, Request
from baton.decode_worker.step_plan import StepPlan
from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.scheduling.draw_costs import ZERO_COSTS, DrawCosts
from baton.runtime import identity
from baton.runtime.config import StepConfig
from baton.runtime.errors import (
    EngineError,
)
from tests.support.scripted_request import scripted_request

SIZE = 4


KEY = b"key"


ROOT = identity.root(KEY, "model", "float32")


class Bench:
    """A scheduler with its pool, one step at a time; every drawn token is 7."""

    def __init__(
        self, blocks: int = 64, costs: DrawCosts = ZERO_COSTS, **step: int | float
    ) -> None:
        settings: dict[str, int | float] = {
            "local_prefill_tokens": 8,
            "expected_growth_tokens": 8,
            "max_sequences": 16,
        }
        settings.update(step)
        self.pool = BlockPool(blocks, SIZE)
        self.scheduler = DecodeScheduler(
            self.pool,
            StepConfig(**settings),  # type: ignore[arg-type] # fields of several types
            KEY,
            costs,
        )
        self._clock = 0.0

    def submit(
        self, prompt: list[int], *, local: bool = True, n: int = 1, max_tokens: int = 16
    ) -> Request:
        self._clock += 1.0
        request = scripted_request(
            prompt, n=n, at_s=self._clock, max_tokens=max_tokens, local=local, root=ROOT
        )
        self.scheduler.submit(request)
        return request

    def grant(self, prompt: list[int], *, n: int = 1) -> Group:
        """Submit for a handoff and admit: the group that is fetching."""
        self.submit(prompt, local=False, n=n)
        (group,) = self.scheduler.admit()
        return group

    def result(
        self,
        plan: StepPlan,
        broken: frozenset[int] = frozenset(),
        failed: Mapping[int, EngineError] | None = None,
    ) -> StepResult:
        drawn = tuple(tuple(Drawn(d.choice, 7) for d in piece.draws) for piece in plan.batch.slices)
        return StepResult(drawn, broken=broken, failed=failed or {})

    def step(self) -> StepPlan:
        self.scheduler.admit()
        plan = self.scheduler.plan()
        if plan:
            self.commit(plan)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """The step is over, and its tokens are accepted."""
        for sequence, token in self.scheduler.commit(plan, self.result(plan)).drawn:
            if not sequence.ended:
                sequence.output.append(token.token)

    def end(self, request: Request) -> None:
        for sequence in request.sequences:
            self.scheduler.end(sequence)
