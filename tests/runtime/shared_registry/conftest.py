"""A Redis server, and clients of the registry on it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import RegistryClient
from baton.runtime.shared_registry.registry_location import open_registry
from chaos.redis_server import RedisServer, running_server, server_binaries
from tests.support.machine_speed import slowness
from tests.support.redis_server import required_binary

TOKEN = "the cluster's token"
ONE = WorkerRecord("decode-0", "a" * 32, "decode", "10.0.0.1:1", "10.0.0.1:2", "m", 10)
TWO = WorkerRecord("prefill-0", "b" * 32, "prefill", "10.0.0.2:1", "10.0.0.2:2", "m", 11)

OpenRegistry = Callable[..., RegistryClient]


def binaries() -> list[object]:
    """Return every server of this machine, Redis or Valkey; the second runs in `make nightly`."""
    found = [pytest.param(path, id=Path(path).name) for path in server_binaries()]
    nightly = [pytest.param(*each.values, id=each.id, marks=pytest.mark.nightly) for each in found]
    return [*found[:1], *nightly[1:]] or [pytest.param(None, id="none")]


@pytest.fixture(params=binaries())
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with running_server(tmp_path, request.param or required_binary()) as made:
        yield made


@pytest.fixture
async def open_client(server: RedisServer) -> AsyncIterator[OpenRegistry]:
    """Opens clients of the server, and closes them."""
    async with contextlib.AsyncExitStack() as stack:

        def opened(*tokens: str, **settings: Any) -> RegistryClient:
            plain = RegistryConfig(location=server.url, lifetime_s=5.0 * slowness())
            config = replace(plain, **settings)
            client = open_registry(config, SecurityConfig(tls="off"), tokens or (TOKEN,))
            stack.push_async_callback(client.close)
            return client

        yield opened
