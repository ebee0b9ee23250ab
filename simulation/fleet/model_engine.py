"""A lab's fleet with a real model on the CPU: wrong KV gives wrong tokens, as in life.

Deterministic: what a token is depends neither on the worker that computes it nor on what is
computed beside it, so one runner of its own says what a run without faults gives. A hundred times
as slow as hashes. Runners are kept from one run to the next, since each has to prove its bits
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import Draw, Drawn, Slice, StepBatch
from baton.engine.scheduling.token_history import history_of
from baton.kv_transfer.block_sizes import SlabRows
from baton.kv_transfer.conversion import Conversions, no_conversions
from baton.runtime.sampling import SamplingParams
from baton.runtime.wire import ModelLimits
from baton.simulation.fleet.engine_kind import StepTime
from baton.simulation.virtual.virtual_steps import VirtualSteps

CONTEXT = 400  # tokens
SMALLEST = 24  # blocks that a runner needs to prove its bits


class ModelKind:
    """Implements `EngineKind` with the model of `folder`. Raises ModelError and ConfigError."""

    name = "model"
    rows: tuple[SlabRows, ...] = ()  # deterministic workers have blocks of one size

    def __init__(self, folder: Path, block_size: int) -> None:
        torch.set_num_threads(1)
        self._folder = folder
        self._block_size = block_size
        self._idle: dict[int, list[ModelRunner]] = {}  # by blocks
        self._lent: list[ModelRunner] = []
        self._reference = self._runner(CONTEXT // block_size)
        self.slabs = self._reference.pool.slabs
        self._remembered = lru_cache(maxsize=4096)(self._draw_all)

    def limits(self, key: bytes) -> ModelLimits:
        runner = self._reference
        vocab_size, kv_dtype = runner.spec.vocab_size, runner.pool.kv_dtype
        return ModelLimits(vocab_size, CONTEXT, runner.numerics or "", kv_dtype, key)

    def block_bytes(self, block_size: int) -> int:
        return self._reference.pool.block_bytes

    def begin(self) -> None:
        for runner in self._lent:
            self._idle.setdefault(runner.pool.blocks, []).append(runner)
        self._lent = []

    def make(
        self, blocks: int, block_size: int, step_s: StepTime
    ) -> tuple[VirtualSteps, NDArray[np.uint8]]:
        idle = self._idle.get(blocks)
        runner = idle.pop() if idle else self._runner(blocks)
        self._lent.append(runner)
        array = runner.pool.bytes_view()
        array[:] = 0
        return VirtualSteps(ModelDevice(runner), step_s), array

    def conversions(self, array: NDArray[np.uint8]) -> Conversions:
        return no_conversions

    def drawn(
        self, prompt: Sequence[int], count: int, params: SamplingParams, choice: int, grammar: str
    ) -> list[Drawn]:
        if grammar:
            raise ValueError("a model's vocabulary is not that of the lab's grammars")
        return list(self._remembered(tuple(prompt), count, params, choice))

    def _runner(self, blocks: int) -> ModelRunner:
        return build_runner(
            self._folder,
            EngineOptions(
                blocks=max(blocks, SMALLEST),
                block_size=self._block_size,
                dtype="bfloat16",
                deterministic=True,
            ),
        )

    def _draw_all(
        self, prompt: tuple[int, ...], count: int, params: SamplingParams, choice: int
    ) -> list[Drawn]:
        tokens, drawn = list(prompt), list[Drawn]()
        blocks = range(self._reference.pool.blocks)
        computed = 0
        for _ in range(count):
            history = history_of(tokens, len(prompt)) if params.needs_history else None
            draw = Draw(choice, len(tokens), params, history)
            piece = Slice(tokens[computed:], computed, blocks, (draw,))
            ((one,),) = self._reference.run(StepBatch((piece,))).drawn
            drawn.append(one)
            computed = len(tokens)
            tokens.append(one.token)
        return drawn


class ModelDevice:
    """Implements virtual_steps' `Device`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def copy_block(self, source: int, target: int) -> None:
        self._runner.pool.copy_block(source, target)

    def propose(self, slices: Sequence[Slice]) -> dict[int, tuple[int, ...]]:
        return {}  # it has no draft model

    def compute_partly(self, slices: Sequence[Slice]) -> None:
        """Write all of it: the model's layers are not split here."""
        self.compute(slices)

    def compute(self, slices: Sequence[Slice]) -> list[tuple[Drawn, ...]]:
        return list(self._runner.run(StepBatch(tuple(slices))).drawn) if slices else []
