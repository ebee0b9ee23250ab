"""The engine's pool as a mover takes it."""

from __future__ import annotations

import numpy as np
import torch

from baton.deploy.processes.pool_memory import local_pool
from baton.engine.memory.kv_pool import KvPool
from baton.engine.spec.model_spec import read_spec
from baton.kv_transfer.checksum import reference
from baton.kv_transfer.local_pool import HostPool
from baton.models.embedded import embedded_model


def test_a_pool_in_host_memory_is_given_as_it_lies() -> None:
    pool = KvPool(read_spec(embedded_model()), 4, 8, torch.float32)
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    found = local_pool(pool)
    assert isinstance(found, HostPool)
    assert found.address == pool.tensor.data_ptr() and found.memory == "DRAM"
    assert (found.blocks, found.block_bytes, found.slabs) == (4, pool.block_bytes, pool.slabs)
    wanted = reference(pool.bytes_view(), [3, 1], [5, 6], pool.slabs)
    assert np.array_equal(found.checksums([3, 1], [5, 6]), wanted)


def test_a_pools_bytes_leave_out_its_spare_block() -> None:
    spec = read_spec(embedded_model())
    pool = KvPool(spec, 3, 8, torch.float32, torch.device("cpu"))  # as on a GPU
    assert pool.tensor.shape[0] == 4
    stored = pool.bytes_tensor()
    assert stored.shape == (3, pool.block_bytes) and stored.is_contiguous()
    assert stored.data_ptr() == pool.tensor.data_ptr()
