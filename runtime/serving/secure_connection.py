"""TLS between a socket and a protocol of HTTP, which works on it as on a plain socket.

    socket ◀─▶ asyncio's transport ◀─▶ SecureConnection ◀─▶ SecureTransport ◀─▶ HTTP's protocol

asyncio's own TLS holds back up to 64 KiB that it counts as sent, waits at the end for the client's
farewell, and makes the protocol after the handshake only, so that a client without one is in no
limit of connections. Here nothing but the plain transport buffers: `pause_writing`, the time for a
slow reader and `close` mean the same with TLS. A connection counts from its beginning, and its
handshake has to end in time. Owned by one connection; the event loop calls everything here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, cast

HANDSHAKE_S = 10.0
SURPLUS_HANDSHAKE_S = 1.0  # of a connection beyond the limit, which gets an answer all the same
RECORD_BYTES = 16 << 10  # of a record of TLS, the most that one read returns
# A memory BIO of OpenSSL never shrinks: it keeps what the largest piece took while the connection
# is open. And records without data cost the loop much for each byte that is read at once.
PIECE_BYTES = 64 << 10
PLAIN_TEXT = b"this port speaks TLS: begin the URL with https://\n"
PLAIN_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%s" % (len(PLAIN_TEXT), PLAIN_TEXT)
)


class SecureTransport(asyncio.Transport):
    """The transport of the protocol of HTTP. Only the plain transport `raw` buffers."""

    def __init__(self, raw: asyncio.Transport, tls: ssl.SSLObject, outgoing: ssl.MemoryBIO) -> None:
        super().__init__()
        self._raw = raw
        self._tls = tls
        self._outgoing = outgoing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._raw.is_closing():
            return
        left, records = memoryview(data), []
        try:
            while left:
                left = left[self._tls.write(left[:PIECE_BYTES]) :]
                records.append(self._outgoing.read())
        except ssl.SSLError:
            self._raw.abort()  # the protocol gets `connection_lost`
            return
        self._raw.write(b"".join(records))  # at once: the protocol counts what is unsent after it

    def flush(self) -> None:
        """Send what TLS has made."""
        if self._outgoing.pending:
            self._raw.write(self._outgoing.read())

    def close(self) -> None:
        """Send what is written, and TLS's farewell; the client's is not waited for."""
        if self._raw.is_closing():
            return
        with contextlib.suppress(ssl.SSLError):  # the client's farewell is missing
            self._tls.unwrap()
        self.flush()
        self._raw.close()

    def abort(self) -> None:
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return self._tls.context
        return self._tls if name == "ssl_object" else self._raw.get_extra_info(name, default)

    def is_reading(self) -> bool:
        return self._raw.is_reading()

    def pause_reading(self) -> None:
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._raw.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._raw.get_write_buffer_limits()

    def can_write_eof(self) -> bool:
        return False


class SecureConnection(asyncio.Protocol):
    """The protocol of the socket. `make` makes that of HTTP, once the handshake has ended;
    `connections` are the server's, of which at most `limit` are served."""

    transport: asyncio.Transport  # the server aborts it

    def __init__(
        self,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.Protocol],
        connections: set[Any],
        limit: int | None,
    ) -> None:
        self._make = make
        self._connections = connections
        self._limit = limit
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._protocol: asyncio.Protocol | None = None  # until the handshake has ended
        self._plain: bool | None = None  # whether the client speaks plain HTTP
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # a socket's
        self.transport.max_size = RECORD_BYTES  # type: ignore[attr-defined]  # asyncio has it
        self._secure = SecureTransport(self.transport, self._tls, self._outgoing)
        seconds = HANDSHAKE_S
        if self._limit is not None and len(self._connections) + 1 >= self._limit:
            seconds = SURPLUS_HANDSHAKE_S
        else:
            self._connections.add(self)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_handshake()
        if self._protocol is not None:
            self._protocol.connection_lost(exc)

    def shutdown(self) -> None:
        """End a connection on which nothing has been asked; the server calls it when it stops."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._plain is None:
            self._plain = data[:1].isalpha()  # a method of HTTP; TLS begins with a control byte
        self._incoming.write(data)
        if self._protocol is None:
            if not self._shake_hands():
                return
            self._end_handshake()
            self._protocol = self._make()
            self._protocol.connection_made(self._secure)
        self._read(self._protocol)

    def eof_received(self) -> None:
        if self._protocol is not None and not self.transport.is_closing():
            self._protocol.eof_received()
            self._secure.close()

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    def _shake_hands(self) -> bool:
        """Go on with the handshake; return whether it has succeeded. The timer runs until the
        connection of one that has failed is closed."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._secure.flush()
            return False
        except ssl.SSLError:
            if self._plain:
                self.transport.write(PLAIN_ANSWER)
            else:
                self._secure.flush()  # the alert that says why
            self.transport.close()
            return False
        self._secure.flush()
        return not self.transport.is_closing()

    def _end_handshake(self) -> None:
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read(self, protocol: asyncio.Protocol) -> None:
        """Give the protocol what has been decrypted, in one piece as from a plain socket."""
        pieces, ended, broken = [], False, False
        try:
            while piece := self._tls.read(RECORD_BYTES):
                pieces.append(piece)
            ended = True  # the client's farewell
        except ssl.SSLWantReadError:
            pass  # the rest of a record is to come
        except ssl.SSLError:
            broken = True
        self._secure.flush()  # answers of TLS itself
        if pieces:
            protocol.data_received(b"".join(pieces))
        if broken:
            self.transport.close()
        elif ended and not self.transport.is_closing():
            protocol.eof_received()
            self._secure.close()
