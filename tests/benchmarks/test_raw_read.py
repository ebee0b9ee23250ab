"""A raw reader's pool has blocks of the granter's size, whatever they hold."""

from __future__ import annotations

import pytest

from baton.kv_transfer import handshake
from baton.kv_transfer.mover import PeerPool
from baton.proto import handoff_pb2, worker_pb2
from benchmarks.figures import raw_read

THEIRS = b"the granter's id"


class Granter:
    """Answers a handshake as a granter does: only what fits gets an answer."""

    def __init__(self, kv_dtype: str, block_bytes: int) -> None:
        self.common = handshake.compatibility("model", kv_dtype, 16, 4, 2, 64)
        self._pool = PeerPool(THEIRS, "nixl", b"metadata", 4096, block_bytes, 8)

    async def Handshake(
        self, theirs: handoff_pb2.HandshakeMessage, **_: object
    ) -> handoff_pb2.HandshakeMessage:
        mine = handshake.build("granter", self._pool, self.common)
        handshake.check(mine, theirs)
        return mine


@pytest.mark.parametrize(
    ("kv_dtype", "block_bytes"),
    [
        ("float32", 2 * 2 * 4 * 16 * 64 * 4),
        ("bfloat16", 2 * 2 * 4 * 16 * 64 * 2),
        ("int8 of bfloat16", 2 * 2 * 4 * 16 * (64 + 4)),  # a scale beside each head's numbers
        ("bfloat16", 4 * 16 * 576 * 2),  # latent: no K and V
    ],
)
async def test_the_size_of_a_block_is_the_granters(kv_dtype: str, block_bytes: int) -> None:
    granter = Granter(kv_dtype, block_bytes)
    reader = raw_read.RawReader(worker_pb2.Candidate(address="127.0.0.1:9"), "token", None)
    try:
        reader.stub = granter
        assert await reader.their_block_bytes(granter.common) == block_bytes
        mine = PeerPool(b"i" * 16, "nixl", b"", 0, block_bytes, 2)
        assert (await reader.greet(mine, granter.common)).boot_id == THEIRS
        assert granter.common.tp_size == 1
    finally:
        await reader.close()
