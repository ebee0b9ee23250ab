"""Workers of one process that compute a model, with or without speculation, for the benchmark.

Those of the simulation's cluster, on real engines: movers and streams are within the process, time
is the machine's. Owns its engines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.decode_worker.speculator import Speculator
from baton.decode_worker.worker import DecodeWorker
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_engine
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.ranks.loading import build_rank_engine
from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer.checksum import SlabGroup
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import MemoryMover
from baton.prefill_worker.worker import PrefillWorker
from baton.runtime.config import Config, HandoffConfig, PoolConfig
from baton.runtime.wire import ModelLimits
from baton.simulation.fleet.cluster import Cluster, Node

BLOCK_TOKENS = 16
CONTEXT_TOKENS = 512
BLOCKS = 1024


class SpeculatingCluster(Cluster):
    """A decode worker "decode-0" and, unless `prefill` is off, a prefill worker. `draft`: the
    folder of a draft model or head, which every engine then has. `ranks`: over how many processes a
    model is split, of prefill and decode workers."""

    def __init__(
        self,
        folder: Path,
        speculator: Callable[[], Speculator | None],
        *,
        prefill: bool = True,
        draft: Path | None = None,
        ranks: tuple[int, int] = (1, 1),
        **options: Any,
    ) -> None:
        self.blocks = BLOCKS
        self._ranks = ranks
        self._next_ranks = 1  # of the engine to come
        self._folder = folder
        self._options = EngineOptions(
            blocks=BLOCKS,
            block_size=BLOCK_TOKENS,
            max_context=CONTEXT_TOKENS,
            draft_folder=draft,
            **options,
        )
        self._engines: list[TorchEngine] = []
        config = Config(pool=PoolConfig(block_size=BLOCK_TOKENS), handoff=HandoffConfig(lease_s=10))
        super().__init__(config, speculator=speculator)
        if prefill:
            self.add_prefill("prefill-0", BLOCKS)
        self.add_decode("decode-0", BLOCKS)

    def add_prefill(self, name: str, blocks: int) -> Node[PrefillWorker]:
        self._next_ranks = self._ranks[0]
        return super().add_prefill(name, blocks)

    def add_decode(self, name: str, blocks: int) -> Node[DecodeWorker]:
        self._next_ranks = self._ranks[1]
        return super().add_decode(name, blocks)

    def limits(self) -> ModelLimits:
        engine = self._engines[0]
        key = b"benchmark"
        vocab_size, dtype = engine.spec.vocab_size, engine.dtype_name
        return ModelLimits(vocab_size, CONTEXT_TOKENS, engine.numerics or "", dtype, key)

    def _below(self, blocks: int) -> tuple[bytes, Any, BlockPool, NDArray[np.uint8], MemoryMover]:
        if self._next_ranks == 1:
            engine = build_engine(self._folder, self._options)
        else:
            engine = build_rank_engine(self._folder, self._next_ranks, self._options)
        self._engines.append(engine)
        array, boot_id = engine.pool.bytes_view(), self.new_id()
        (slabs, _), *beside = engine.pool.slab_groups
        own = HostPool(array, slabs, SlabGroup(*beside[0]) if beside else None)
        mover = MemoryMover(own, boot_id, self.exchange)
        return boot_id, engine, BlockPool(blocks, BLOCK_TOKENS), array, mover

    async def close(self) -> None:
        await super().close()
        for engine in self._engines:
            await engine.close()
