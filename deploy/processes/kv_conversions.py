"""The conversions of a worker's KV for readers that store it in another dtype.

The engine converts, the handoff checksums and offers: this module joins them, on a host or on a
GPU. Keeps no state.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton.engine.memory.kv_conversion import conversion_to
from baton.engine.memory.kv_pool import KvPool
from baton.engine.spec.model_spec import ModelSpec
from baton.kv_transfer.checksum import SlabGroup
from baton.kv_transfer.conversion import Conversion, HostConversion, numba_checksums


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
