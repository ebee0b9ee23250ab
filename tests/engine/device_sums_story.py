"""Sums of a pool's blocks by the GPU's kernels, and a handoff that uses them at both ends.

    TRITON_INTERPRET=1 python -P tests/engine/device_sums_story.py

Prints one JSON object. The pool lies in host memory, which the interpreter's kernels read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import torch

from baton.engine.triton.device_checksums import DeviceChecksums
from baton.kv_transfer.checksum import reference
from baton.kv_transfer.local_pool import DevicePool

BLOCKS, BYTES, SLABS = 6, 192, 3
SEEDS = [(1 << 64) - 1, 5, 0xDEADBEEF12345678]


def filled(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, BYTES), dtype=np.uint8)


def equal(sums: DeviceChecksums, array: np.ndarray, blocks: list[int]) -> bool:
    seeds = SEEDS[: len(blocks)]
    found = sums(blocks, seeds)
    return found.dtype == np.uint64 and np.array_equal(
        found, reference(array, blocks, seeds, SLABS)
    )


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except (IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


async def handoff() -> dict[str, bool] | None:
    """READ blocks between two pools whose sums the kernels compute; then spoil one."""
    if find_spec("nixl") is None:
        return None
    from baton.kv_transfer.nixl_mover import NixlMover

    arrays = [filled(1), np.zeros((BLOCKS, BYTES), np.uint8)]
    pools = [
        DevicePool(
            address=array.ctypes.data,
            blocks=BLOCKS,
            block_bytes=BYTES,
            slabs=SLABS,
            device_id=0,
            compute_checksums=DeviceChecksums(torch.from_numpy(array), SLABS),
            enter=lambda: None,
            memory="DRAM",
        )
        for array in arrays
    ]
    granter, reader = (NixlMover(pool, bytes([n]) * 16) for n, pool in enumerate(pools, 1))
    granter.hold_progress()
    await reader.connect(granter.describe())
    read = reader.read(b"\1" * 16, [5, 1], [2, 0], seeds=SEEDS[:2])
    assert read.checksums is not None
    own, theirs = await read.checksums, await granter.checksums([5, 1], SEEDS[:2])
    arrays[1][0, 7] ^= 1
    spoiled = await reader.checksums([2, 0], SEEDS[:2])
    await reader.close()
    await granter.close()
    return {
        "equal": bool((arrays[1][2] == arrays[0][5]).all()),
        "sums": bool((own == theirs).all()),
        "spoiled": (spoiled == theirs).all(axis=1).tolist() == [True, False],
    }


def main() -> None:
    array = filled(3)
    sums = DeviceChecksums(torch.from_numpy(array), SLABS)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(equal, sums, array, [n, 0]) for n in range(4)]
    reported = {
        "sums": {
            "one": equal(sums, array, [5]),
            "two": equal(sums, array, [2, 2]),
            "three": equal(sums, array, [4, 0, 5]),
            "none": sums([], []).shape == (0, SLABS),
        },
        "threads": [one.result() for one in asked],
        "refused": {
            "block beyond": refusal(lambda: sums([0, BLOCKS], [1, 2])),
            "block before": refusal(lambda: sums([-1], [1])),
            "seeds": refusal(lambda: sums([0, 1], [1])),
            "slabs": refusal(lambda: DeviceChecksums(torch.from_numpy(array), 5)),
        },
        "handoff": asyncio.run(handoff()),
    }
    print(json.dumps(reported))


if __name__ == "__main__":
    main()
