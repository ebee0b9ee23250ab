"""Turns the engine's KV pool into what a handoff takes: plain memory, its kind, its checksums, and
its conversions for readers that store KV in another dtype.

The one place that knows both sides of that seam. Keeps no state.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton.deploy.host.packages import INSTALL
from baton.engine.memory.kv_conversion import conversion_to
from baton.engine.memory.kv_pool import KvPool
from baton.engine.spec.model_spec import ModelSpec
from baton.kv_transfer import checksum
from baton.kv_transfer.block_sizes import SlabRows
from baton.kv_transfer.checksum import SlabGroup
from baton.kv_transfer.conversion import Conversion, HostConversion, numba_checksums
from baton.kv_transfer.local_pool import DevicePool, HostPool, LocalPool, RankedPool
from baton.runtime.errors import ConfigError


def local_pool(pool: KvPool, kv_heads: int = 1) -> LocalPool:
    """Return the pool as a mover takes it, with its checksum kernel compiled: one pool, or those of
    all ranks, which hold `kv_heads` of the whole model. Raises ConfigError if a GPU's kernels
    compute other checksums than the handoff."""
    if pool.parts:
        return RankedPool([_one_pool(part) for part in pool.parts], kv_heads)
    return _one_pool(pool)


def _one_pool(pool: KvPool) -> LocalPool:
    if pool.tensor.device.type == "cpu":
        try:
            from baton.kv_transfer import checksum_numba
        except ImportError as error:
            raise ConfigError(
                f"a worker on a CPU needs numba for its checksums ({error}): {INSTALL}"
            ) from error
        checksum_numba.warm_up()
        (target_slabs, _), *beside = pool.slab_groups
        draft = SlabGroup(*beside[0]) if beside else None
        rows = [SlabRows(slabs, areas) for slabs, areas in pool.slab_rows]
        return HostPool(pool.bytes_view(), target_slabs, draft, rows)
    return device_pool(pool.bytes_tensor(), pool.slabs)


def device_pool(stored: Tensor, slabs: int) -> DevicePool:
    """Return the pool of `stored`, uint8 [blocks, block_bytes] on a GPU, contiguous. Raises as
    `local_pool`."""
    from baton.engine.triton.checksum import ALGORITHM
    from baton.engine.triton.device_checksums import DeviceChecksums, enter_device

    if ALGORITHM != checksum.CHECKSUM_ALGORITHM:
        raise ConfigError(
            f"this GPU's checksums are {ALGORITHM}, the handoff's {checksum.CHECKSUM_ALGORITHM}: "
            "install engine and kv_transfer of one version, or set worker.device to cpu"
        )
    blocks, block_bytes = stored.shape
    return DevicePool(
        address=stored.data_ptr(),
        blocks=blocks,
        block_bytes=block_bytes,
        slabs=slabs,
        device_id=stored.device.index,
        compute_checksums=DeviceChecksums(stored, slabs),
        enter=partial(enter_device, stored.device),
    )


def conversion_of(pool: KvPool, spec: ModelSpec, kv_dtype: str) -> Conversion | None:
    """Return the conversion of the pool's blocks to a reader's `kv_dtype`; None: there is none, as
    for the pools of several ranks."""
    if pool.parts:
        return None
    engine = conversion_to(pool, spec, kv_dtype)
    if engine is None:
        return None
    if pool.tensor.device.type != "cpu":
        from baton.engine.triton.device_conversion import DeviceConversion

        return None if pool.draft is not None else DeviceConversion(pool, engine, kv_dtype)
    (slabs, _), *beside = pool.slab_groups
    checksums = numba_checksums(slabs, SlabGroup(*beside[0]) if beside else None)

    def converted(block: int) -> NDArray[np.uint8]:
        content: NDArray[np.uint8] = engine.converted([block]).numpy()
        return content

    return HostConversion(kv_dtype, engine.block_bytes, pool.bytes_view(), converted, checksums)
