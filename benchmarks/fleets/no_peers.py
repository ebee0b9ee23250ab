"""Peers of a decode worker that has no prefill workers: it computes every prompt by itself."""

from __future__ import annotations

import math

from baton.kv_transfer.peers.peer_client import HandoffLink
from baton.proto import worker_pb2
from baton.runtime.errors import Unavailable


class NoPeers:
    async def open(
        self, candidate: worker_pb2.Candidate, contact_s: float = math.inf
    ) -> HandoffLink:
        raise Unavailable(f"{candidate.worker_id} is not there")

    def forget(self, boot_id: bytes) -> None: ...

    def degraded(self) -> list[worker_pb2.DegradedPeer]:
        return []

    def transport(self, boot_id: bytes) -> str:
        raise NotImplementedError("no stream is ever open")

    async def close(self) -> None: ...
