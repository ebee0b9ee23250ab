"""The engine of a lab's fleet: hashes by default, a model where one is asked for.

A kind makes the engines of one run's processes, and says what a run without any fault draws.
Knows no fleet, no time and no faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.engine.scheduling.batch import Drawn, StepBatch
from baton.runtime.sampling import SamplingParams
from baton.runtime.wire import ModelLimits
from baton.simulation.fleet.hash_engine import HashEngine, block_bytes, expected_draws
from baton.simulation.virtual.virtual_steps import VirtualSteps

SLABS = 2
VOCAB = 1000
MAX_CONTEXT = 10_000

StepTime = Callable[[StepBatch], float]


class EngineKind(Protocol):
    slabs: int
    name: str  # as `baton faults --engine` takes it

    def limits(self, key: bytes) -> ModelLimits: ...

    def block_bytes(self, block_size: int) -> int: ...

    def begin(self) -> None:
        """A run begins: the engines of the one before are not used any more."""
        ...

    def make(
        self, blocks: int, block_size: int, step_s: StepTime
    ) -> tuple[VirtualSteps, NDArray[np.uint8]]:
        """An engine, and its pool's memory, uint8 [blocks, block_bytes]."""
        ...

    def drawn(
        self, prompt: Sequence[int], count: int, params: SamplingParams, choice: int, grammar: str
    ) -> list[Drawn]:
        """The first `count` draws of a choice in a run without faults; fewer where `grammar`, of
        the lab's vocabulary, ends it. Raises ValueError if the kind has another vocabulary."""
        ...


class HashKind:
    """`drafts`: a draft model proposes, whose KV is one slab more of each block."""

    name = "hash"

    def __init__(self, *, drafts: bool = False) -> None:
        self.drafts = drafts
        self.slabs = SLABS + drafts

    def limits(self, key: bytes) -> ModelLimits:
        return ModelLimits(VOCAB, MAX_CONTEXT, "hash-engine", "uint8", key)

    def block_bytes(self, block_size: int) -> int:
        return block_bytes(block_size, self.slabs)

    def begin(self) -> None:
        pass

    def make(
        self, blocks: int, block_size: int, step_s: StepTime
    ) -> tuple[VirtualSteps, NDArray[np.uint8]]:
        array = np.zeros((blocks, self.block_bytes(block_size)), dtype=np.uint8)
        engine = HashEngine(
            array,
            block_size=block_size,
            slabs=SLABS,
            vocab_size=VOCAB,
            step_s=step_s,
            drafts=self.drafts,
        )
        return engine, array

    def drawn(
        self, prompt: Sequence[int], count: int, params: SamplingParams, choice: int, grammar: str
    ) -> list[Drawn]:
        return expected_draws(
            prompt,
            count,
            params,
            choice=choice,
            slabs=SLABS,
            vocab_size=VOCAB,
            grammar=grammar,
        )


HASHES = HashKind()
DRAFTING_HASHES = HashKind(drafts=True)
