"""A worker's handshake message, of its settings: which splits of a model fit each other."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest

from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.deploy.processes.worker_roles import Below, Boot
from baton.engine.memory.kv_pool import KvPool
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.spec.model_spec import read_spec
from baton.kv_transfer import handshake
from baton.kv_transfer.mover import PeerPool
from baton.models.embedded import embedded_model
from baton.proto import handoff_pb2
from baton.runtime.config import Config, WorkerConfig
from baton.runtime.errors import Incompatible
from baton.runtime.registry import MemoryRegistry
from baton.runtime.registry_client import InlineRegistry
from baton.runtime.wire import ModelLimits

BLOCKS, BLOCK_BYTES = 8, 4096


class StandIn:
    """The engine and the mover, as far as a handshake asks them."""

    spec = read_spec(embedded_model())
    pool = KvPool(spec, BLOCKS, 16)
    bridges_sizes = True

    def describe(self) -> PeerPool:
        return PeerPool(
            os.urandom(16), "nixl", b"meta", 1 << 40, BLOCK_BYTES, BLOCKS, 0, "DRAM", {}
        )


def message(**settings: Any) -> handoff_pb2.HandshakeMessage:
    boot = Boot(
        config=Config(worker=WorkerConfig(**settings)),
        role="decode",
        worker_id="decode-0",
        boot_id=os.urandom(16),
        model_folder=embedded_model(),
        registry=InlineRegistry(MemoryRegistry()),
        secrets=ClusterSecrets(("secret",), "secret"),
    )
    limits = ModelLimits(99, 99, "the same model", "float32", b"key")
    stand_in = cast(Any, StandIn())
    return Below(boot, stand_in, BlockPool(BLOCKS, 16), stand_in, limits).handshake()


@pytest.mark.parametrize("other", [{"tp": 2}, {"tp": 4, "ep": 4}])
def test_deterministic_workers_refuse_unequal_splits(other: dict[str, int]) -> None:
    mine = message(deterministic=True, tp=4, ep=2)
    handshake.check(mine, message(deterministic=True, tp=4, ep=2))
    theirs = message(deterministic=True, **other)
    there = f"tp {other['tp']} ep {other.get('ep', 1)}"
    with pytest.raises(Incompatible, match=f"deterministic_split 'tp 4 ep 2' here, '{there}'"):
        handshake.check(mine, theirs)


def test_deterministic_workers_read_no_blocks_of_another_size() -> None:
    """Whether the same bits come of other blocks has not been proved."""
    assert message().compatibility.bridges_sizes
    assert not message(deterministic=True).compatibility.bridges_sizes


def test_other_workers_of_unequal_splits_fit() -> None:
    handshake.check(message(tp=4, ep=2), message())
