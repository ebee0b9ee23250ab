"""The engine of a lab's fleet: hashes by default, a model where one is asked for.

A kind makes the engines of one run's processes, and says what a run without any fault draws.
Knows no fleet, no time and no faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from baton.engine.scheduling.batch import Drawn, StepBatch
from baton.kv_transfer.block_sizes import SlabRows
from baton.kv_transfer.conversion import Conversions, HostConversion
from baton.kv_transfer.local_pool import HostPool
from baton.runtime.sampling import SamplingParams
from baton.runtime.wire import ModelLimits
from baton.runtime.worker.kv_bridge import bridges
from baton.simulation.fleet.hash_engine import (
    RECORD_BYTES,
    WIDE_BYTES,
    HashEngine,
    block_bytes,
    expected_draws,
    narrowed,
    widened,
)
from baton.simulation.virtual.virtual_steps import VirtualSteps

SLABS = 2
VOCAB = 1000
MAX_CONTEXT = 10_000
WIDE, NARROW = "wide", "int8 of wide"  # KV dtypes of unlike workers
_LOW = 0xFFFFFFFF

StepTime = Callable[[StepBatch], float]


class PlainSums(HostPool):
    """A pool whose checksums cost a microsecond: a CRC beside the rest of the seed."""

    def _checksums_of(
        self, stored: NDArray[np.uint8], blocks: Sequence[int], seeds: Sequence[int]
    ) -> NDArray[np.uint64]:
        block_bytes = stored.shape[1]
        width = block_bytes // self.slabs
        found = []
        for block, seed in zip(blocks, seeds, strict=True):
            content = stored[block].tobytes()
            for start in range(0, block_bytes, width):
                part = crc32(content[start : start + width], seed & _LOW)
                found.append(part << 32 | seed >> 32)
        return np.array(found, dtype=np.uint64).reshape(len(found) // self.slabs, self.slabs)


class EngineKind(Protocol):
    slabs: int
    name: str  # as `baton faults --engine` takes it
    rows: tuple[SlabRows, ...]  # of a block; empty: workers have blocks of one size

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

    def conversions(self, array: NDArray[np.uint8]) -> Conversions:
        """Return what a worker with this pool converts its KV to."""
        ...

    def drawn(
        self, prompt: Sequence[int], count: int, params: SamplingParams, choice: int, grammar: str
    ) -> list[Drawn]:
        """The first `count` draws of a choice in a run without faults; fewer where `grammar`, of
        the lab's vocabulary, ends it. Raises ValueError if the kind has another vocabulary."""
        ...


class HashKind:
    """`drafts`: a draft model proposes, whose KV is one slab more of each block. `form`: how KV is
    stored; None: as in fleets of like workers."""

    name = "hash"

    def __init__(
        self, *, drafts: bool = False, form: Literal["narrow", "wide"] | None = None
    ) -> None:
        self.drafts = drafts
        self.slabs = SLABS + drafts
        self._wide = form == "wide"
        record_bytes = WIDE_BYTES if self._wide else RECORD_BYTES
        self.rows: tuple[SlabRows, ...] = (SlabRows(self.slabs, ((1, record_bytes),)),)
        self._kv_dtype = {None: "uint8", "narrow": NARROW, "wide": WIDE}[form]

    def limits(self, key: bytes) -> ModelLimits:
        return ModelLimits(VOCAB, MAX_CONTEXT, "hash-engine", self._kv_dtype, key)

    def block_bytes(self, block_size: int) -> int:
        return block_bytes(block_size, self.slabs, wide=self._wide)

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
            wide=self._wide,
        )
        return engine, array

    def conversions(self, array: NDArray[np.uint8]) -> Conversions:
        return partial(self._conversion, array)

    def _conversion(self, array: NDArray[np.uint8], kv_dtype: str) -> HostConversion | None:
        """Return the conversion to the other form."""
        if not bridges(self._kv_dtype, kv_dtype):
            return None
        form = narrowed if self._wide else widened

        def converted(block: int) -> NDArray[np.uint8]:
            return form(array[block]).reshape(1, -1)

        def checksums(content: NDArray[np.uint8], seed: int) -> NDArray[np.uint64]:
            sums: NDArray[np.uint64] = PlainSums(content, self.slabs).checksums((0,), (seed,))[0]
            return sums

        return HostConversion(kv_dtype, converted(0).shape[1], array, converted, checksums)

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
NARROW_HASHES, WIDE_HASHES = HashKind(form="narrow"), HashKind(form="wide")
DRAFTING_HASHES = HashKind(drafts=True)
