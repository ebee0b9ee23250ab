"""TLS over a transport that records what it sends, without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import cast

from baton.runtime.serving.client_tls import ClientTls
from baton.runtime.serving.secure_connection import (
    PIECE_BYTES,
    RECORD_BYTES,
    SecureConnection,
    SecureTransport,
)
from tests.support.client_certificates import ClientCertificates

ANSWER = bytes(range(256)) * (16 << 10)  # 4 MiB


class Wire(asyncio.Transport):
    """A transport of a socket whose client reads at once."""

    max_size = 256 << 10  # as asyncio's

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))

    def is_closing(self) -> bool:
        return False


class Noted:
    """A memory BIO that notes the most that it held when it was read."""

    def __init__(self, own: ssl.MemoryBIO) -> None:
        self._own = own
        self.largest = 0

    def read(self) -> bytes:
        self.largest = max(self.largest, self._own.pending)
        return self._own.read()


def test_a_large_answer_leaves_no_large_buffer(tmp_path: Path) -> None:
    """What OpenSSL once held it keeps for as long as the connection is open."""
    certificates = ClientCertificates(tmp_path / "clients")
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = certificates.trusting().wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    context = ClientTls(str(certificates.folder)).context()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    wire, noted = Wire(), Noted(to_client)
    noted.read()  # tickets of the session, which this client does not need
    SecureTransport(wire, server, cast(ssl.MemoryBIO, noted)).write(ANSWER)
    assert PIECE_BYTES < noted.largest < PIECE_BYTES + (PIECE_BYTES >> 3)
    (sent,) = wire.sent  # at once: the protocol counts what is unsent after the first write
    assert len(ANSWER) < len(sent) < 1.01 * len(ANSWER)


async def test_a_read_is_small(tmp_path: Path) -> None:
    """A read of records without data costs the loop much for each byte."""
    certificates, wire = ClientCertificates(tmp_path / "clients"), Wire()
    context = ClientTls(str(certificates.folder)).context()
    made = SecureConnection(context, asyncio.Protocol, set(), limit=None)
    made.connection_made(wire)
    assert wire.max_size == RECORD_BYTES
    made.connection_lost(None)
