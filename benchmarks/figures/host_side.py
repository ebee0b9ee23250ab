"""The host's part of a decode step of many sequences: the real scheduler on a stand-in device.

Plans, prepares and commits as the decode worker does; what a device would draw is made up.
Owns a block pool and the sequences in it; no tensors but those that a step is laid out in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from opentelemetry.context import Context

from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Request, Sequence
from baton.decode_worker.step_plan import StepPlan
from baton.engine.execution.runner import prepare
from baton.engine.model.step_layout import Bounds
from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.proto import worker_pb2
from baton.runtime import identity
from baton.runtime.config import StepConfig
from baton.runtime.sampling import SamplingParams

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 4096
BLOCK_TOKENS = 16
VOCABULARY = 8192
_KEY = b"benchmark"


@dataclass(frozen=True, slots=True)
class HostTimes:
    plan_s: float
    prepare_s: float
    commit_s: float

    @property
    def total_s(self) -> float:
        return self.plan_s + self.prepare_s + self.commit_s


class HostSide:
    """`count` greedy sequences that decode after prompts of 512 tokens."""

    def __init__(self, count: int) -> None:
        blocks = count * ((PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_TOKENS + 1)
        config = StepConfig(
            local_prefill_tokens=count * PROMPT_TOKENS,
            max_sequences=count,
            max_queue=count,
            waiting_share=1.0,
        )
        self.pool = BlockPool(blocks, BLOCK_TOKENS)
        self.scheduler = DecodeScheduler(self.pool, config, _KEY)
        self._bounds = Bounds(blocks, BLOCK_TOKENS, VOCABULARY, PROMPT_TOKENS + OUTPUT_TOKENS)
        for number in range(count):
            self._submit(number)
        while self.scheduler.running < count:  # their prompts
            self.scheduler.admit()
            plan = self.scheduler.plan()
            if not plan:
                raise RuntimeError(f"{self.scheduler.running} of {count} sequences have room")
            self._commit(plan, _made_up(plan))

    def step(self) -> HostTimes:
        """One decode step of all sequences."""
        start = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        prepare(plan.batch, self._bounds)
        prepared = time.perf_counter()
        result = _made_up(plan)
        drawn = time.perf_counter()
        self._commit(plan, result)
        committed = time.perf_counter()
        return HostTimes(planned - start, prepared - planned, committed - drawn)

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        for sequence, drawn in self.scheduler.commit(plan, result).drawn:
            sequence.output.append(drawn.token)

    def _submit(self, number: int) -> None:
        request = Request(
            request_id=str(number),
            attempt=1,
            prompt=[(number + index) % VOCABULARY for index in range(PROMPT_TOKENS)],
            sampling=SamplingParams(temperature=0.0),
            wire_sampling=worker_pb2.Sampling(),
            max_tokens=OUTPUT_TOKENS,
            stop_token_ids=frozenset(),
            local=True,
            candidates=[],
            cache_salt=b"",
            root=identity.root(_KEY, "model", "bfloat16"),
            trace=Context(),
            arrived_s=float(number),
            arrived_wall_s=0.0,
            emit=lambda output: None,
        )
        request.sequences = [Sequence(request, 0, [])]
        self.scheduler.submit(request)


def _made_up(plan: StepPlan) -> StepResult:
    drawn = tuple(
        tuple(Drawn(draw.choice, draw.position % VOCABULARY) for draw in item.draws)
        for item in plan.batch.slices
    )
    return StepResult(drawn)
