"""A simulated cluster whose engines compute a model, so that wrong KV gives wrong words.

Movers and streams are those of the cluster; engines, pools and sums are real. Deterministic unless
asked otherwise, so that an answer depends neither on the worker that computes it nor on what is
computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.decode_worker.speculator import Speculator
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_engine
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.memory.kv_conversion import conversion_to
from baton.engine.memory.kv_pool import KvPool
from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer.block_sizes import SlabRows
from baton.kv_transfer.checksum import SlabGroup
from baton.kv_transfer.conversion import Conversions, HostConversion, numba_checksums
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import MemoryMover
from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.runtime.wire import ModelLimits
from baton.simulation.fleet.cluster import Cluster

_CONTEXT = 400
_STEP = {
    "prefill_tokens": 48,
    "chunk_tokens": 24,
    "local_prefill_tokens": 16,
    "expected_growth_tokens": 16,
}


class ModelCluster(Cluster):
    """Its engines compute the model of `folder` in `dtype`, on one thread each, beside the draft
    model of `draft`. `step` changes settings of the section of that name. A worker stores KV as
    `kv_dtype` says when it is added, in blocks of `block_size`; workers that differ in one are not
    `deterministic`."""

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int,
        dtype: str = "bfloat16",
        kv_dtype: str = "auto",
        verify: bool = True,
        deterministic: bool = True,
        draft: Path | None = None,
        lease_s: float = 5.0,
        speculator: Callable[[], Speculator | None] = lambda: None,
        **step: int,
    ) -> None:
        self._folder, self._dtype = folder, dtype
        self.kv_dtype = kv_dtype
        self._deterministic, self._draft = deterministic, draft
        self.engines: list[TorchEngine] = []
        settings: dict[str, Any] = {**_STEP, **step}
        handoff = HandoffConfig(lease_s=lease_s, verify=verify)
        pool = PoolConfig(block_size=block_size)
        config = Config(pool=pool, step=StepConfig(**settings), handoff=handoff)
        super().__init__(config, speculator=speculator)

    def limits(self) -> ModelLimits:
        numerics = {engine.numerics for engine in self.engines}
        assert len(numerics) == 1  # every worker computes the same bits
        return ModelLimits(
            self.engines[0].spec.vocab_size,
            _CONTEXT,
            numerics.pop() or "",
            self.engines[-1].dtype_name,
            b"cluster key",
        )

    def _below(self, blocks: int) -> tuple[bytes, Any, BlockPool, NDArray[np.uint8], MemoryMover]:
        engine = build_engine(
            self._folder,
            EngineOptions(
                blocks=blocks,
                block_size=self.block_size,
                dtype=self._dtype,
                threads=1,
                deterministic=self._deterministic,
                kv_dtype=self.kv_dtype,
                draft_folder=self._draft,
            ),
        )
        self.engines.append(engine)
        array, boot_id = engine.pool.bytes_view(), self.new_id()
        rows = [SlabRows(slabs, areas) for slabs, areas in engine.pool.slab_rows]
        own = HostPool(array, *_slab_groups(engine.pool), rows)
        mover = MemoryMover(own, boot_id, self.exchange)
        return boot_id, engine, BlockPool(blocks, self.block_size), array, mover

    def conversions(self, engine: TorchEngine) -> Conversions:
        return partial(_conversion_of, engine)

    async def close(self) -> None:
        await super().close()
        for engine in self.engines:
            await engine.close()


def _conversion_of(engine: TorchEngine, kv_dtype: str) -> HostConversion | None:
    pool = engine.pool
    found = conversion_to(pool, engine.spec, kv_dtype)
    if found is None:
        return None

    def converted(block: int) -> NDArray[np.uint8]:
        content: NDArray[np.uint8] = found.converted([block]).numpy()
        return content

    checksums = numba_checksums(*_slab_groups(pool))
    return HostConversion(kv_dtype, found.block_bytes, pool.bytes_view(), converted, checksums)


def _slab_groups(pool: KvPool) -> tuple[int, SlabGroup | None]:
    """Return the slabs of the model's layers in each block, and the draft model's group."""
    (slabs, _), *beside = pool.slab_groups
    return slabs, SlabGroup(*beside[0]) if beside else None
