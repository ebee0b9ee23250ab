"""Compiled checksums of KV blocks in host memory, as `checksum.py` defines them.

The module needs numba, so only workers with a pool in host memory import it. It keeps no state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.checksum import LOW, MIX_A, MIX_B, PHI, WORD_BYTES, SlabGroup, slab_groups

F = TypeVar("F", bound=Callable[..., Any])


def checksums(
    blocks_of_pool: NDArray[np.uint8],
    blocks: Sequence[int],
    seeds: Sequence[int],
    slabs: int,
    draft: SlabGroup | None = None,
) -> NDArray[np.uint64]:
    """Return the checksums of some blocks of a pool, without holding the GIL.

    `blocks_of_pool` is [pool blocks, block_bytes], C-contiguous; for `draft` see `slab_groups`. The
    result is [len(blocks), slabs of all groups]. Raises ValueError if a slab is not a whole number
    of words, IndexError if a block is not in the pool.
    """
    groups = slab_groups(blocks_of_pool.shape[1], slabs, draft)
    words = blocks_of_pool.view(np.uint64)
    index = np.asarray(blocks, dtype=np.int64)
    if index.size and (index.min() < 0 or index.max() >= words.shape[0]):
        raise IndexError(f"{list(blocks)}: one is not in a pool of {words.shape[0]} blocks")
    keys = np.asarray(seeds, dtype=np.uint64)
    checksums_out = np.empty((len(index), sum(group.slabs for group in groups)), dtype=np.uint64)
    first, column = 0, 0
    for group in groups:
        width = group.slab_bytes // WORD_BYTES
        _sum_blocks(
            words, index, keys, (first, width), (column, column + group.slabs), checksums_out
        )
        first, column = first + group.slabs * width, column + group.slabs
    return checksums_out


def warm_up() -> None:
    """Compile the kernel, or load it from its cache, before serving."""
    checksums(np.zeros((1, WORD_BYTES), dtype=np.uint8), [0], [0], 1)


def _compiled(function: F) -> F:
    """Compile `function` to run without the GIL. The code is cached in a folder if there is one,
    else compiled at every start."""
    made: Any = numba.njit(nogil=True)(function)
    if _has_folder():
        with suppress(RuntimeError):  # no folder can be written
            made.enable_caching()
    return cast(F, made)


def _has_folder() -> bool:
    """Return whether the folder for cached code is one wherever this process runs. That of a user
    without a home would be `~` in its working folder, whose owner could have it load any code."""
    settings: Any = numba.config
    user_folder = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~"))
    return bool(settings.CACHE_DIR) or os.path.isabs(user_folder)


@_compiled
def _mix(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> np.uint64(30))) * MIX_A
    value = (value ^ (value >> np.uint64(27))) * MIX_B
    return value ^ (value >> np.uint64(31))


@_compiled
def _sum_blocks(
    words: NDArray[np.uint64],
    blocks: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    group_words: tuple[int, int],  # the group's first word in a block, and words of a slab
    columns: tuple[int, int],  # of the group in `checksums_out`
    checksums_out: NDArray[np.uint64],
) -> None:
    first, width = group_words
    for row in range(blocks.shape[0]):
        block = words[blocks[row]]
        seed = seeds[row]
        for column in range(columns[0], columns[1]):
            start = first + (column - columns[0]) * width
            part = block[start : start + width]
            product = np.uint64(0)
            total = np.uint64(0)
            for i in range(width):
                keyed = part[i] ^ (seed + np.uint64(i) * PHI)
                product += (keyed & LOW) * (keyed >> np.uint64(32))
                total += part[i]
            checksums_out[row, column] = _mix(product ^ _mix(total + seed))
