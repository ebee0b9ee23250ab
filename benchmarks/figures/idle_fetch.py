"""A fetch with nothing beside it: the product's reader and mover on blocks that are all there.

A reader of this process opens a handoff of a prompt that the granter has cached. What the granter
says is held back until it has computed and offered everything; then the reader hears it at once,
and fetches and verifies on a machine where no other process computes. It is the real
`HandoffReader` over the real `NixlMover`, into a pool of its own; only the hearing is delayed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np

from baton.kv_transfer import checksum_numba, handshake
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.nixl_mover import READ_THREADS, NixlMover
from baton.kv_transfer.reader import HandoffReader
from baton.proto import handoff_pb2, handoff_pb2_grpc, worker_pb2
from baton.runtime import identity
from baton.runtime.config import HandoffConfig
from baton.runtime.grpc_links import ClientLink, credentials, open_channel
from baton.runtime.tls import Tls
from benchmarks.figures.handoff_opening import open_handoff

GRANTED_S = 60.0
SETTLE_S = 0.05  # the granter's loop and the last sums come to rest
SPOKEN = ("opened", "acknowledged", "failed")  # of the lease: never held back


class HoldingLink:
    """A handoff's link whose offers, sums and first tokens wait until `blocks` are offered."""

    def __init__(
        self, link: ClientLink[handoff_pb2.ReaderMessage, handoff_pb2.GranterMessage], blocks: int
    ) -> None:
        self._link = link
        self._missing = blocks
        self._held: list[handoff_pb2.GranterMessage] = []

    async def send(self, message: handoff_pb2.ReaderMessage) -> None:
        await self._link.send(message)

    async def receive(self) -> handoff_pb2.GranterMessage:
        while self._missing > 0:
            message = await self._link.receive()
            if message.WhichOneof("kind") in SPOKEN:
                return message
            self._missing -= len(message.offer.blocks)
            self._held.append(message)
            if self._missing <= 0:
                # The granter's loop and the last checksums come to rest.
                await asyncio.sleep(SETTLE_S)
        if self._held:
            await asyncio.sleep(0)  # a stream's loop turns between its messages
            return self._held.pop(0)
        return await self._link.receive()

    async def close(self) -> None:
        await self._link.close()


class IdleFetch:
    """Use: `connect`, then `seconds` for each cached prompt, then `close`."""

    def __init__(
        self, candidate: worker_pb2.Candidate, token: str, tls: Tls | None, config: HandoffConfig
    ) -> None:
        self._candidate = candidate
        self._metadata = credentials(token)
        self._channel = open_channel(candidate.address, tls)
        self._stub = handoff_pb2_grpc.HandoffStub(self._channel)
        self._key = identity.cluster_key(token)
        self._own = secrets.token_bytes(handshake.BOOT_ID_BYTES)
        self._config = config

    async def connect(
        self, common: handoff_pb2.Compatibility, block_bytes: int, blocks: int
    ) -> None:
        """An own pool of `blocks`, in huge pages as a worker's, and the mover that fills it."""
        checksum_numba.warm_up()
        memory = mmap(-1, blocks * block_bytes, MAP_PRIVATE | MAP_ANONYMOUS)
        memory.madvise(MADV_HUGEPAGE)
        pool = np.frombuffer(memory, dtype=np.uint8).reshape(blocks, block_bytes)
        pool[:] = 1  # every page is there before anything is timed
        self._mover = NixlMover(HostPool(pool, common.kv_heads), self._own, READ_THREADS)
        mine = handshake.build("idle-fetch", self._mover.describe(), common)
        theirs = await self._stub.Handshake(mine, metadata=self._metadata, timeout=5)
        handshake.check(mine, theirs)
        await self._mover.connect(handshake.peer_pool(theirs))
        self._root = identity.root(self._key, common.model_fingerprint, common.kv_dtype)

    async def seconds(self, tokens: Sequence[int], block_tokens: int) -> float:
        """Return the seconds from hearing the first offer to the last block verified, per block of
        the prompt."""
        count = -(-len(tokens) // block_tokens)
        link = HoldingLink(ClientLink(self._stub.Open(metadata=self._metadata)), count)
        reader = HandoffReader(
            link, self._mover, self._candidate.boot_id, block_tokens, self._config, _no_quarantine
        )
        lease_ms = round(self._config.lease_s * 1000)
        opening = open_handoff(self._candidate.boot_id, self._own, tokens, lease_ms)
        names = identity.chain(self._key, self._root, tokens, block_tokens)
        async with asyncio.timeout(GRANTED_S):
            report = await reader.fetch(opening, range(count), names, lambda first: None)
        await reader.finished()
        return (report.verified - report.first_offer) / count

    async def close(self) -> None:
        await self._mover.close()
        await self._channel.close()


def _no_quarantine(blocks: Sequence[int], settled: asyncio.Future[None]) -> None:
    raise RuntimeError(f"a READ of {len(blocks)} blocks did not end")
