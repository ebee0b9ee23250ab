"""The bounds of queues that no setting changes reach the objects that hold the queues."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace import export

from baton.kv_transfer.granter import OFFER_QUEUE, GrantingWorker, _Handoff
from baton.proto import handoff_pb2
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.radix_index import CAPACITY_BLOCKS
from baton.router.requests.prompt_limits import ContextLimits
from baton.router.server import bind
from baton.runtime import grpc_links
from baton.runtime.config import Config, HandoffConfig, RouterConfig
from baton.runtime.registry import MemoryRegistry
from baton.runtime.registry_client import InlineRegistry
from baton.runtime.telemetry import tracing
from baton.runtime.worker.block_feed import EVENT_QUEUE
from baton.simulation.fleet.cluster import Cluster


def test_router_index_remembers_its_capacity_of_blocks() -> None:
    nothing = cast(Any, None)
    limits = ContextLimits(100, 100)
    fleet = Fleet(InlineRegistry(MemoryRegistry()), nothing, RouterConfig(), b"key", limits)
    assert fleet.index.capacity_blocks == CAPACITY_BLOCKS == 4 << 20


def test_router_port_queues_its_backlog_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(socket.socket, "listen", lambda self, backlog: lengths.append(backlog))
    bind("127.0.0.1", 0, 77).close()
    assert lengths == [77]


async def test_block_feed_of_each_worker_bounds_its_events() -> None:
    cluster = Cluster(Config())
    for node in (cluster.add_prefill("p", 8), cluster.add_decode("d", 8)):
        assert node.worker.feed.max_events == EVENT_QUEUE == 1024
    await cluster.close()


async def test_handoff_bounds_the_chunks_without_checksums() -> None:
    opening = handoff_pb2.OpenHandoff(lease_ms=100)
    nothing, mover = cast(Any, None), Cluster(Config()).add_prefill("p", 8).mover
    worker = GrantingWorker(mover, b"boot", HandoffConfig())
    made = _Handoff(nothing, opening, 0.0, nothing, worker, lambda: None)
    assert made.to_checksum.maxsize == OFFER_QUEUE == 64


def test_worker_server_bounds_its_connections() -> None:
    options = dict(grpc_links.server_options(grpc_links.MAX_CONNECTIONS))
    assert options["grpc.max_allowed_incoming_connections"] == 4096


def test_span_exporter_bounds_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    made = export.BatchSpanProcessor.__init__

    def noting(self: export.BatchSpanProcessor, *given: Any, **options: Any) -> None:
        lengths.append(options["max_queue_size"])
        made(self, *given, **options)

    monkeypatch.setattr(export.BatchSpanProcessor, "__init__", noting)
    tracing.setup("router", "127.0.0.1:9")
    tracing.shutdown(timeout_s=0.1)
    assert lengths == [tracing.QUEUE_SPANS]
