"""From the engine's KV pool to what a mover takes: plain memory, its kind, and who sums it.

The one place that knows both sides of that seam. Keeps no state.
"""

from __future__ import annotations

from functools import partial

from baton.engine.pool import KvPool
from baton.kv_transfer import checksum
from baton.kv_transfer.local_pool import DevicePool, HostPool, LocalPool
from baton.runtime.errors import ConfigError


def local_pool(pool: KvPool) -> LocalPool:
    """Ready to be summed: its kernel is compiled, or loaded. Raises ConfigError where a GPU's
    kernels compute other sums than the handoff's."""
    device = pool.tensor.device
    if device.type == "cpu":
        checksum.warm_up()
        return HostPool(pool.bytes_view(), pool.slabs)
    from baton.engine.device_sums import DeviceSums, enter_device
    from baton.engine.triton_checksum import ALGORITHM

    if ALGORITHM != checksum.CHECKSUM_ALGORITHM:
        raise ConfigError(
            f"this GPU's checksums are {ALGORITHM}, the handoff's {checksum.CHECKSUM_ALGORITHM}: "
            "install engine and kv_transfer of one version, or set worker.device to cpu"
        )
    stored = pool.bytes_tensor()
    return DevicePool(
        address=stored.data_ptr(),
        blocks=pool.blocks,
        block_bytes=pool.block_bytes,
        slabs=pool.slabs,
        device_id=device.index,
        summing=DeviceSums(stored, pool.slabs),
        enter=partial(enter_device, device),
    )
