"""A decode scheduler over a real target and what proposes for it, on a clock of fixed steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Request, Sequence
from baton.decode_worker.speculator import Speculator
from baton.decode_worker.step_plan import StepPlan
from baton.engine.execution.engine_options import DraftKind, EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.blocks import BlockPool
from baton.runtime import identity
from baton.runtime.config import StepConfig
from tests.support.scripted_request import scripted_request

KEY = b"key"
ROOT = identity.root(KEY, "model", "float32")


class DraftingWorker:
    """Steps of a scheduler on a runner, one planned ahead where `ahead`. `draft`: the folder of
    what proposes, a draft model or, by `kind`, a head."""

    def __init__(
        self,
        target: Path,
        draft: Path | None,
        kind: DraftKind = "draft",
        *,
        ahead: bool = False,
        longest: int = 4,
        blocks: int = 96,
        growth_tokens: int = 256,
    ) -> None:
        options = EngineOptions(
            blocks=blocks, dtype="float32", backend="torch", draft_folder=draft, draft_kind=kind
        )
        self.blocks = blocks
        self.runner: ModelRunner = build_runner(target, options)
        self.runner.pool.tensor.fill_(math.nan)
        beside = self.runner.pool.draft
        for part in () if beside is None else (beside.tensor, beside.features):
            if part is not None:
                part.fill_(math.nan)
        self.pool = BlockPool(blocks, self.runner.pool.block_size)
        self.speculator = Speculator(None, longest, kind) if draft else None
        config = StepConfig(
            local_prefill_tokens=32, max_sequences=8, expected_growth_tokens=growth_tokens
        )
        self.scheduler = DecodeScheduler(self.pool, config, KEY, speculator=self.speculator)
        self.ahead = ahead
        self.accepted = self.proposed = 0

    def serve(self, texts: list[list[int]], max_tokens: int, **how: Any) -> list[list[int]]:
        requests: list[Request] = []
        for at_s, prompt in enumerate(texts):
            request = scripted_request(
                prompt, at_s=float(at_s), max_tokens=max_tokens, local=True, root=ROOT, **how
            )
            self.scheduler.submit(request)
            requests.append(request)
        plans: list[StepPlan] = []
        results = self.results(plans)
        while any(not request.ended for request in requests):
            self.scheduler.admit()
            while len(plans) < 1 + self.ahead and (plan := self.scheduler.plan()):
                plans.append(plan)
            next(results)
            self.check_published()
        self.pool.check()
        return [sequence.output for request in requests for sequence in request.sequences]

    def results(self, plans: list[StepPlan]) -> Iterator[None]:
        while True:
            plan = plans[0]
            result = self.runner.run(plan.batch)
            # Fixed times, so that draft lengths do not depend on how busy the machine is.
            result = replace(result, device_s=0.01, draft_s=0.001 if result.draft_s else 0.0)
            assert not result.broken and not result.failed
            plans.pop(0)
            outcome = self.scheduler.commit(plan, result)
            for sequence, token in outcome.drawn:
                self.take(sequence, [token.token])
            for run in outcome.runs:
                self.accepted, self.proposed = (
                    self.accepted + run.accepted,
                    self.proposed + run.proposed,
                )
                self.take(run.sequence, [each.token for each in run.drawn])
            yield

    def take(self, sequence: Sequence, tokens: list[int]) -> None:
        if sequence.ended:
            return
        sequence.output += tokens
        assert len(sequence.output) <= sequence.request.max_tokens
        if len(sequence.output) == sequence.request.max_tokens:
            self.scheduler.end(sequence)

    def check_published(self) -> None:
        """Assert that blocks which another request may match hold the KV of both models."""
        pool = self.runner.pool
        for block in range(self.blocks):
            if self.pool.identity_of(block) is None:
                continue
            assert pool.tensor[block].isfinite().all()
            assert pool.draft is None or pool.draft.tensor[block].isfinite().all(), block
