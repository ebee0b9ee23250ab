"""Speed of the block checksum against xxh3 on this machine, one thread, interleaved.

python -m benchmarks.checksum          needs the package `xxhash`; prints JSON
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import xxhash

from baton.kv_transfer.checksum import CHECKSUM_ALGORITHM
from baton.kv_transfer.checksum_numba import checksums, warm_up

POOL_BLOCKS = 64
BLOCK_BYTES = 1792 << 10  # a block of a 0.45 B-parameter model in bf16
CALL_BLOCKS = 16
SLABS = 8
ROUNDS = 40


def main() -> None:
    pool = np.random.default_rng(0).integers(0, 256, (POOL_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    warm_up()

    def ours(blocks: list[int]) -> None:
        checksums(pool, blocks, blocks, SLABS)

    def xxh3(blocks: list[int]) -> None:
        for block in blocks:
            for slab in pool[block].reshape(SLABS, -1):
                xxhash.xxh3_64_intdigest(slab.data, seed=block)

    ways: dict[str, Callable[[list[int]], None]] = {CHECKSUM_ALGORITHM: ours, "xxh3_64": xxh3}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS):
        blocks = [(turn * CALL_BLOCKS + i) % POOL_BLOCKS for i in range(CALL_BLOCKS)]
        for name, way in ways.items():
            begun = time.perf_counter()
            way(blocks)
            seconds[name].append(time.perf_counter() - begun)
    size = CALL_BLOCKS * BLOCK_BYTES / 1e9
    speeds = {name: size / statistics.median(s) for name, s in seconds.items()}
    print(json.dumps({f"{name}_gb_per_s_p50": round(speed, 2) for name, speed in speeds.items()}))


if __name__ == "__main__":
    main()
