"""A prefill worker that greets, for the tests of peers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.proto import handoff_pb2_grpc
from baton.runtime.grpc_links import open_server
from tests.support.peer_scene import Peer, Scene


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    peer, server = Peer(), open_server("token")
    handoff_pb2_grpc.add_HandoffServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    scene = Scene(peer, f"127.0.0.1:{port}")
    scene.register(peer.boot_id)
    yield scene
    await scene.peers.close()
    await server.stop(grace=0)
