"""Decode workers on one GPU in this process, for `benchmarks.gpu_parts.speculation`.

Those of the simulation's cluster, on a random model of a known shape; every request is prefilled
where it decodes, so no KV moves. Owns its engines.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton.decode_worker.speculator import Speculator
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import MemoryMover
from baton.runtime.config import Config, PoolConfig
from baton.runtime.wire import ModelLimits
from baton.simulation.fleet.cluster import Cluster
from benchmarks.fleets.oracle_speedup import OraclePair
from benchmarks.gpu_parts.models import BLOCK_SIZE, random_weights, sized_runner, step_dtype
from benchmarks.gpu_parts.speed import Given

CONTEXT = 512
FORCED = {7: 1000.0}  # bias: rounding, which differs with the rows of a step, decides no token


class DeviceCluster(Cluster):
    """Decode workers of the 0.6 B shape that share its weights, for one sequence each."""

    def __init__(
        self, given: Given, speculator: Callable[[], Speculator], buckets: tuple[int, ...]
    ) -> None:
        self._device, self._shape = given.device, given.shape("qwen3-0.6b")
        self._buckets = buckets
        self._weights = random_weights(self._shape, given.device, step_dtype(given.device))
        self._engines: list[TorchEngine] = []
        super().__init__(Config(pool=PoolConfig(block_size=BLOCK_SIZE)), speculator=speculator)

    def limits(self) -> ModelLimits:
        engine = self._engines[0]
        vocab = engine.spec.vocab_size
        return ModelLimits(vocab, CONTEXT, engine.numerics or "", engine.dtype_name, b"benchmark")

    def _below(self, blocks: int) -> tuple[bytes, Any, BlockPool, NDArray[np.uint8], MemoryMover]:
        runner = sized_runner(
            self._shape,
            self._device,
            rows=blocks * BLOCK_SIZE // CONTEXT,
            context=CONTEXT,
            buckets=self._buckets,
            weights=self._weights,
        )
        own = None  # the interpreter's
        if self._device.type == "cuda":
            own = torch.device("cuda", torch.cuda.current_device())
        engine = TorchEngine(runner, device=own, draw_costs=runner.measure_draws())
        self._engines.append(engine)
        # The mover's own: it would read another worker's pool, and there is no handoff.
        array = np.zeros((blocks, runner.pool.block_bytes), dtype=np.uint8)
        boot_id = self.new_id()
        mover = MemoryMover(HostPool(array, self._shape.kv_heads), boot_id, self.exchange)
        return boot_id, engine, BlockPool(blocks, BLOCK_SIZE), array, mover

    async def close(self) -> None:
        await super().close()
        for engine in self._engines:
            await engine.close()


async def oracle_speedup(given: Given, share: float, proposed: int) -> tuple[float, float]:
    """Return the measured speed-up, and it over what the formula allows: medians over rounds."""
    pair = OraclePair(proposed)
    rounds, tokens = (1, 5) if given.dry else (5, 160)
    cluster = DeviceCluster(given, pair.speculator, (1, 2, proposed + 1))
    try:
        for name in ("decode-0", "decode-1"):
            cluster.add_decode(name, 2 * CONTEXT // BLOCK_SIZE)
        ratios = await pair.ratios(
            cluster,
            given.shape("qwen3-0.6b").vocab,
            (share,),
            rounds=rounds,
            tokens=tokens,
            logit_bias=FORCED,
        )
    finally:
        await cluster.close()
    return median(pair.speedups[share]), median(ratios[share])
