"""A prefill scheduler with its pool, whose steps succeed unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context

from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.scheduling.draw_costs import ZERO_COSTS, DrawCosts
from baton.kv_transfer.granter import Computed
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import PrefillScheduler
from baton.proto import handoff_pb2
from baton.runtime import identity
from baton.runtime.config import StepConfig
from baton.runtime.errors import EngineError
from baton.runtime.sampling import SamplingParams

SIZE = 4
ROOT = identity.root(b"key", "model", "float32")


class PrefillBench:
    """A scheduler, its pool, and steps that succeed."""

    def __init__(self, blocks: int = 32, costs: DrawCosts = ZERO_COSTS, **step: int) -> None:
        settings = StepConfig(**{"prefill_tokens": 16, "chunk_tokens": 8, **step})
        self.fresh: list[int] = []
        self.pool = BlockPool(blocks, SIZE)
        self.failed: set[bytes] = set()  # boot ids of sources that may not be asked
        self.scheduler = PrefillScheduler(
            self.pool,
            settings,
            self.fresh.extend,
            costs,
            lambda source: source.boot_id not in self.failed,
        )

    def submit(self, tokens: list[int], held: int = 0, choices: int = 1, **fields: Any) -> Prompt:
        prompt = Prompt(
            request_id="r",
            tokens=tokens,
            prompt_tokens=len(tokens),
            held_blocks=held,
            params=SamplingParams(),
            choices=list(range(choices)),
            identities=identity.chain(b"key", ROOT, tokens, SIZE),
            tenant=b"t",
            trace=Context(),
            arrived_wall_s=0.0,
            on_end=self.scheduler.end,
            **fields,
        )
        self.scheduler.submit(prompt)
        return prompt

    def step(
        self,
        broken: frozenset[int] = frozenset(),
        failed: Mapping[int, EngineError] | None = None,
    ) -> int:
        """Run one step; return how many tokens it computed."""
        self.scheduler.admit()
        plan = self.scheduler.plan()
        drawn = tuple(tuple(Drawn(d.choice, 7) for d in piece.draws) for piece in plan.batch.slices)
        self.scheduler.commit(plan, StepResult(drawn, broken=broken, failed=failed or {}))
        return sum(len(piece.tokens) for piece in plan.batch.slices)

    def run(self) -> None:
        while self.step():
            pass


def events(prompt: Prompt) -> list[str]:
    """Return what the granter gets, a short text for each event."""
    seen = []
    while not prompt.events.empty():
        event = prompt.events.get_nowait()
        if isinstance(event, Computed):
            partial = f" partial {event.partial_tokens}" if event.partial_tokens else ""
            seen.append(f"offer {event.first}+{len(event.blocks)}{partial}")
        elif isinstance(event, handoff_pb2.FirstTokens):
            seen.append(f"first {len(event.tokens)} cached {event.cached_tokens}")
        else:
            seen.append(repr(event))
    return seen
