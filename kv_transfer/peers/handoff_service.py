"""The gRPC service of a worker for its readers: handshakes and handoffs. Both roles serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

from baton.kv_transfer import handshake
from baton.kv_transfer.peers.contact_answers import ContactAnswers
from baton.kv_transfer.peers.grants import Grants
from baton.proto import handoff_pb2, handoff_pb2_grpc
from baton.runtime import logs
from baton.runtime.errors import BatonError
from baton.runtime.grpc_links import ServerLink, abort

log = logs.get(__name__)


class HandoffService(handoff_pb2_grpc.HandoffServicer):
    """A handoff outlives its stream: its lease is served by a task of the worker's own."""

    def __init__(self, grants: Grants, mine: Callable[[], handoff_pb2.HandshakeMessage]) -> None:
        self._grants = grants
        self._mine = mine
        self._answers = ContactAnswers(grants, mine)
        self._handoffs: set[asyncio.Task[None]] = set()

    async def Handshake(
        self, theirs: handoff_pb2.HandshakeMessage, context: grpc.aio.ServicerContext[Any, Any]
    ) -> handoff_pb2.HandshakeMessage:
        try:
            handshake.check(self._mine(), theirs)
        except BatonError as error:
            await abort(context, error)
        return self._answers.answer(theirs)

    async def Open(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        link: ServerLink[handoff_pb2.GranterMessage, handoff_pb2.ReaderMessage]
        link = ServerLink(context)
        task = asyncio.create_task(self._grants.serve(link))
        self._handoffs.add(task)
        task.add_done_callback(self._handoffs.discard)
        await asyncio.shield(task)

    async def finished(self, within_s: float) -> None:
        """Wait until every handoff is over, at most `within_s`: a reader may renew for ever."""
        if self._handoffs:
            _, open_still = await asyncio.wait(set(self._handoffs), timeout=within_s)
            if open_still:
                log.warning("handoffs abandoned", handoffs=len(open_still))
