"""A pipeline over a device whose steps end when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from baton.engine.scheduling.batch import Draw, Slice, StepBatch, StepResult, abandon
from baton.engine.scheduling.draw_costs import ZERO_COSTS, DrawCosts
from baton.engine.scheduling.step_pipeline import CompletedStep, StepPipeline
from baton.runtime.errors import EngineError
from baton.runtime.sampling import SamplingParams

Outcome = StepResult | EngineError


@dataclass
class Plan:
    batch: StepBatch


class Handle:
    def __init__(self, future: asyncio.Future[StepResult]) -> None:
        self._future = future

    async def result(self) -> StepResult:
        return await asyncio.shield(self._future)

    def abandon(self) -> None:
        abandon(self._future)


class Device:
    def __init__(self) -> None:
        self.draw_costs = ZERO_COSTS
        self.steps: list[asyncio.Future[StepResult]] = []
        self.refusal: EngineError | None = None

    def compiled_s(self) -> float:
        return 0.0

    def submit(self, batch: StepBatch) -> Handle:
        if self.refusal is not None:
            raise self.refusal
        self.steps.append(asyncio.get_running_loop().create_future())
        return Handle(self.steps[-1])

    async def close(self) -> None:
        pass

    def end(self, step: int, device_s: float = 0.0, outcome: Outcome | None = None) -> None:
        if isinstance(outcome, EngineError):
            self.steps[step].set_exception(outcome)
        else:
            self.steps[step].set_result(outcome or StepResult((), device_s))


class CompilingDevice(Device):
    seconds = 0.0

    def compiled_s(self) -> float:
        return self.seconds


def chunk(tokens: int = 1, start: int = 0) -> Plan:
    """Plan one slice; with one token it is a decode step."""
    return Plan(StepBatch((Slice([1] * tokens, start, [0]),)))


def decode(sequences: int, params: SamplingParams | None = None) -> Plan:
    draws = () if params is None else (Draw(0, 6, params),)
    return Plan(StepBatch(tuple(Slice([1], 5, [number], draws) for number in range(sequences))))


def verification(sequences: int, proposed: int) -> Plan:
    tokens = [1] * (proposed + 1)
    slices = [Slice(tokens, 5, [number], proposed=proposed) for number in range(sequences)]
    return Plan(StepBatch(tuple(slices)))


class PipelineScene:
    chunk, decode = staticmethod(chunk), staticmethod(decode)
    verification = staticmethod(verification)

    def __init__(self, *, compiles: bool = False, costs: DrawCosts = ZERO_COSTS) -> None:
        self.device = CompilingDevice() if compiles else Device()
        self.device.draw_costs = costs
        self.steps: StepPipeline[Plan] = StepPipeline(self.device)

    def awaited(self) -> asyncio.Future[StepResult] | None:
        """Return the result of the oldest step, which the pipeline waits for."""
        return self.steps._result

    def forget(self) -> None:
        """Drop the pipeline's own references to its steps."""
        self.steps._steps.clear()
        self.steps._result = None

    def known_chunks(self) -> list[tuple[int, bool]]:
        """Return tokens of the known steps with chunks, and whether each read as hung."""
        return [(known.size.tokens, known.hung) for known in self.steps._last[True]]

    async def over(self) -> CompletedStep[Plan]:
        """The oldest step, which is not asked whether the next one should be planned."""
        found = await self.steps.next()
        assert found is not None
        return found

    async def run(
        self, plans: Iterable[Plan], step_s: float, outcome: Outcome | None = None
    ) -> list[CompletedStep[Plan]]:
        """One after the other; each takes so long."""
        ended = []
        for plan in plans:
            self.steps.submit(plan)
            self.end_after(step_s, outcome)
            ended.append(await self.steps.next() or await self.over())
        return ended

    def end_after(self, step_s: float, outcome: Outcome | None = None) -> None:
        """The step that was submitted last."""
        last = len(self.device.steps) - 1
        asyncio.get_running_loop().call_later(step_s, self.device.end, last, 0.0, outcome)

    async def planned_after_s(self, plan: Plan) -> float:
        """How long it runs until the step after it should be planned."""
        now_s = asyncio.get_running_loop().time
        self.steps.submit(plan)
        began_s = now_s()
        assert await self.steps.next() is None
        return now_s() - began_s

    def allowed_s(self, plan: Plan) -> float:
        """How long it may take, as the last step of all."""
        self.steps.submit(plan)
        due_s, now_s = self.steps.due_s(), asyncio.get_running_loop().time()
        assert due_s is not None
        self.steps.close()
        return due_s - now_s
