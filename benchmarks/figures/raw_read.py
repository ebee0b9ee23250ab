"""Raw NIXL READs of the very blocks that a handoff moves: the limit that a fetch is held against.

A reader of its own process and pool opens a handoff of the same prompt, which the granter has
cached by now, so that it offers the same blocks. They are read by one NIXL call, in one thread
that does nothing else: no window, no checksums, no event loop. Nothing of it is verified.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Sequence
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np

from baton.kv_transfer import handshake
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.nixl_library import library_versions, load_bindings
from baton.proto import handoff_pb2, handoff_pb2_grpc, worker_pb2
from baton.runtime.grpc_links import ClientLink, credentials, open_channel
from baton.runtime.tls import Tls
from benchmarks.figures.handoff_opening import open_handoff

OFFERS_S = 60.0
READ_S = 10.0
REPEATS = 3
SETTLE_S = 0.05  # in which the granter computes checksums
RENEW_S = 0.4
LEASE_MS = 10_000

GranterLink = ClientLink[handoff_pb2.ReaderMessage, handoff_pb2.GranterMessage]


class RawReader:
    """Use: `connect`, then `times` for each prompt, then `close`."""

    def __init__(self, candidate: worker_pb2.Candidate, token: str, tls: Tls | None) -> None:
        self._candidate = candidate
        self._metadata = credentials(token)
        self._channel = open_channel(candidate.address, tls)
        self.stub = handoff_pb2_grpc.HandoffStub(self._channel)
        self._boot_id = secrets.token_bytes(16)
        self._turn = 0
        self._versions: dict[str, str] = {}  # of libraries, once they are loaded

    async def connect(self, common: handoff_pb2.Compatibility, blocks: int) -> None:
        """Make an own pool of `blocks`, greet the granter, prepare both lists of blocks.
        `common` are the pools' properties, but for the size of a block in bytes."""
        bindings = load_bindings()
        config = bindings.nixl_agent_config(backends=[], enable_prog_thread=False)
        self._agent = bindings.nixl_agent(self._boot_id.hex(), config)
        self._agent.create_backend("UCX", {})
        self._versions = library_versions(bindings.__name__)
        self.block_bytes, self._blocks = await self.their_block_bytes(common), blocks
        self._memory = mmap(-1, blocks * self.block_bytes, MAP_PRIVATE | MAP_ANONYMOUS)
        self._memory.madvise(MADV_HUGEPAGE)
        self._pool = np.frombuffer(self._memory, dtype=np.uint8).reshape(blocks, -1)
        self._pool[:] = 1  # every page is there before anything is timed
        base = self._pool.ctypes.data
        self._agent.register_memory([(base, self._pool.nbytes, 0, "")], "DRAM")
        mine = PeerPool(
            self._boot_id,
            "nixl",
            self._agent.get_agent_metadata(),
            base,
            self.block_bytes,
            blocks,
            versions=self._versions,
        )
        theirs = await self.greet(mine, common)
        name = self._agent.add_remote_agent(theirs.metadata)
        self._local = self._prepare("NIXL_INIT_AGENT", mine)
        self._remote = self._prepare(name, theirs)

    async def their_block_bytes(self, common: handoff_pb2.Compatibility) -> int:
        """Ask the granter for the bytes of its block, as a reader of another split: its blocks may
        have another size, and this reader has no pool yet."""
        other_split = handoff_pb2.Compatibility()
        other_split.CopyFrom(common)
        other_split.tp_size += 1
        none_yet = PeerPool(self._boot_id, "nixl", b"", 0, 0, 0, versions=self._versions)
        return (await self.greet(none_yet, other_split)).block_bytes

    async def greet(self, mine: PeerPool, common: handoff_pb2.Compatibility) -> PeerPool:
        """Send a handshake of `mine` and return the pool of the granter."""
        words = handshake.build("raw-reader", mine, common)
        theirs = await self.stub.Handshake(words, metadata=self._metadata, timeout=5)
        return handshake.peer_pool(theirs)

    async def times(self, tokens: Sequence[int], last_blocks: int) -> tuple[float, float]:
        """Seconds of a READ of all full blocks of a prompt, and of its last `last_blocks`;
        medians of a few READs, alternating."""
        link: GranterLink = ClientLink(self.stub.Open(metadata=self._metadata))
        opening = open_handoff(self._candidate.boot_id, self._boot_id, tokens, LEASE_MS)
        await link.send(handoff_pb2.ReaderMessage(open=opening))
        renewing = asyncio.create_task(_renew(link))
        try:
            blocks = await self._offered(link, last_blocks)
            everything, last = [], []
            for _ in range(REPEATS):
                last.append(await asyncio.to_thread(self._read, blocks[-last_blocks:]))
                everything.append(await asyncio.to_thread(self._read, blocks))
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        await link.send(handoff_pb2.ReaderMessage(closed=handoff_pb2.Closed()))
        await link.close()
        return float(np.median(everything)) / len(blocks), float(np.median(last))

    async def _offered(self, link: GranterLink, least: int) -> list[int]:
        """The granter's blocks, once it has computed and offered all. Raises RuntimeError."""
        async with asyncio.timeout(OFFERS_S):
            offered: dict[int, int] = {}
            first_tokens = False
            while not first_tokens or len(offered) < least:
                message = await link.receive()
                if message.HasField("failed"):
                    raise RuntimeError(f"the granter failed: {message.failed}")
                offer = message.offer
                offered |= {offer.first + i: block for i, block in enumerate(offer.blocks)}
                first_tokens = first_tokens or message.HasField("first_tokens")
        # The granter computes checksums in this time.
        await asyncio.sleep(SETTLE_S)
        return [offered[index] for index in sorted(offered)]

    async def close(self) -> None:
        await self._channel.close()

    def _prepare(self, name: Any, pool: PeerPool) -> Any:
        row = [pool.base_address, pool.block_bytes, 0, pool.block_bytes, pool.num_blocks]
        return self._agent.prep_xfer_dlist(name, np.array([row], dtype=np.uint64), "DRAM")

    def _read(self, remote: Sequence[int]) -> float:
        """Seconds of one READ, into other own blocks each time."""
        local = [(self._turn + i) % self._blocks for i in range(len(remote))]
        self._turn += len(remote)
        begun = time.perf_counter()
        handle = self._agent.make_prepped_xfer(
            "READ",
            self._local,
            np.asarray(local, dtype=np.int32),
            self._remote,
            np.asarray(remote, dtype=np.int32),
        )
        state = self._agent.transfer(handle)
        while state == "PROC" and time.perf_counter() - begun < READ_S:
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - begun
        handle.release()
        if state != "DONE":
            raise RuntimeError(f"NIXL reports {state} for a raw READ")
        return seconds


async def _renew(link: GranterLink) -> None:
    for n in itertools.count(1):
        # A lease is renewed at this period.
        await asyncio.sleep(RENEW_S)
        await link.send(handoff_pb2.ReaderMessage(renew=handoff_pb2.Renew(n=n)))
