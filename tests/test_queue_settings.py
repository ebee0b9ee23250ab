"""Each queue's length is its setting: the process that has it is given what the file says."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace import export

from baton.deploy.processes import worker_roles
from baton.kv_transfer.granter import _Handoff
from baton.proto import handoff_pb2
from baton.router.fleet.fleet import Fleet
from baton.router.requests.context_limits import ContextLimits
from baton.router.server import bind
from baton.runtime import tracing
from baton.runtime.config import Config, HandoffConfig, RouterConfig, WorkerConfig
from baton.runtime.registry import MemoryRegistry
from baton.runtime.registry_client import InlineRegistry
from baton.simulation.fleet.cluster import Cluster


def test_the_index_of_a_router_remembers_so_many_blocks() -> None:
    config = RouterConfig(index_blocks=2048)
    fleet = Fleet(
        InlineRegistry(MemoryRegistry()), cast(Any, None), config, b"key", ContextLimits(100, 100)
    )
    assert fleet.index._capacity == 2048


def test_so_many_connections_wait_at_a_routers_port(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(socket.socket, "listen", lambda self, backlog: lengths.append(backlog))
    bind("127.0.0.1", 0, 77).close()
    assert lengths == [77]


async def test_so_many_block_events_wait_for_one_router() -> None:
    cluster = Cluster(Config(worker=WorkerConfig(event_queue=33)))
    for node in (cluster.add_prefill("p", 8), cluster.add_decode("d", 8)):
        assert node.worker.feed._most == 33
    await cluster.close()


async def test_so_many_chunks_of_a_handoff_wait_for_their_sums() -> None:
    opening = handoff_pb2.OpenHandoff(lease_ms=100)
    config = HandoffConfig(offer_queue=5)
    nothing, mover = cast(Any, None), Cluster(Config()).add_prefill("p", 8).mover
    made = _Handoff(nothing, opening, 0.0, nothing, mover, b"boot", config, None)
    assert made._to_sum.maxsize == 5


def test_so_many_connections_has_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened(Exception):
        """With how many connections."""

    def opened(token: str, most: int) -> None:
        raise Opened(most)

    monkeypatch.setattr(worker_roles, "open_server", opened)
    boot = SimpleNamespace(token="t", config=Config(worker=WorkerConfig(max_connections=99)))
    with pytest.raises(Opened, match="99"):
        worker_roles._server(cast(Any, boot), cast(Any, None))


def test_so_many_spans_wait_to_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    made = export.BatchSpanProcessor.__init__

    def noting(self: Any, *given: Any, **options: Any) -> None:
        lengths.append(options["max_queue_size"])
        made(self, *given, **options)

    monkeypatch.setattr(export.BatchSpanProcessor, "__init__", noting)
    tracing.setup("router", "127.0.0.1:9", 600)
    tracing.shutdown(timeout_s=0.1)
    assert lengths == [600]
