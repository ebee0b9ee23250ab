"""What a worker's process builds of its settings, as its peers see it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.deploy.processes import worker_roles
from baton.deploy.processes.worker_roles import Below, Boot
from baton.engine.memory.kv_pool import KvPool
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.spec.model_spec import read_spec
from baton.kv_transfer import handshake
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import MemoryExchange, MemoryMover
from baton.models.embedded import embedded_model
from baton.proto import handoff_pb2
from baton.runtime.config import Config, HandoffConfig, WorkerConfig
from baton.runtime.errors import Incompatible
from baton.runtime.registry import MemoryRegistry
from baton.runtime.registry_client import InlineRegistry
from baton.runtime.wire import ModelLimits


class NamedEngine:
    """Of an engine what a handshake asks for."""

    def __init__(self) -> None:
        self.spec = read_spec(embedded_model())
        self.pool = KvPool(self.spec, 4, 16)


def handshake_of(worker_id: str, config: Config) -> handoff_pb2.HandshakeMessage:
    return below(worker_id, config).handshake()


def below(worker_id: str, config: Config) -> Below:
    boot = Boot(
        config,
        "decode",
        worker_id,
        os.urandom(16),
        embedded_model(),
        InlineRegistry(MemoryRegistry()),
        ClusterSecrets(("secret",), "secret"),
    )
    array = np.zeros((4, 256), dtype=np.uint8)
    mover: Any = MemoryMover(HostPool(array, 1), boot.boot_id, MemoryExchange())
    engine: Any = NamedEngine()
    limits = ModelLimits(100, 64, "model", "float32", b"key")
    return Below(boot, engine, BlockPool(4, 16), mover, limits)


def test_workers_of_equal_settings_fit() -> None:
    handshake.check(handshake_of("a", Config()), handshake_of("b", Config()))


def test_workers_of_unlike_verification_are_refused_by_name() -> None:
    """One would wait for checksums that the other does not send."""
    unlike = replace(Config(), handoff=HandoffConfig(verify=False))
    stated = [below("a", config).stated_limits().kv_terms for config in (Config(), unlike)]
    assert stated[0] != stated[1] == handshake.terms(handshake_of("b", unlike))
    with pytest.raises(Incompatible, match="verify True here, False there"):
        handshake.check(handshake_of("a", Config()), handshake_of("b", unlike))


def test_conversions_are_made_once_for_all_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each has a stream of its own."""
    made: list[str] = []

    def conversion_of(pool: object, spec: object, kv_dtype: str) -> object:
        made.append(kv_dtype)
        return object() if kv_dtype.startswith("int8") else None

    monkeypatch.setattr(worker_roles, "conversion_of", conversion_of)
    parts = below("a", replace(Config(), worker=WorkerConfig(deterministic=False)))
    names = [list(parts.handshake().compatibility.bridged_dtypes) for _ in range(3)]
    assert names == [["int8 of float32"]] * 3 and made.count("int8 of float32") == 1
    assert parts.conversions("int8 of float32") is parts.conversions("int8 of float32")
