"""HTTP on a connection to the admin port: uvicorn's protocol, with bounds on what a client costs.

One request a connection; a body is not read. The request line and headers must be small and
arrive soon, and the client must read its answer soon. A client that sends nothing cannot keep out
another: one connection too many closes the oldest.
"""

from __future__ import annotations

import asyncio
from typing import cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 8 << 10  # request line and headers
HEAD_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 5.0  # for the client to read the answer
MAX_CONNECTIONS = 64


class AdminHttpProtocol(HttpToolsProtocol):
    """One connection. `_timer` closes it while a head is awaited and while an answer is sent;
    between the two the application bounds the time."""

    _timer: asyncio.TimerHandle | None = None
    _accepted_s = 0.0
    _received_bytes = 0  # until the head is complete
    _head_bytes = 0
    _head_complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvicorn only serves streams
        super().connection_made(transport)
        self._accepted_s = self.loop.time()
        self._close_after(HEAD_TIMEOUT_S)
        if len(self.connections) > MAX_CONNECTIONS:
            others = (each for each in self.connections if isinstance(each, AdminHttpProtocol))
            oldest = min(others, key=lambda each: each._accepted_s)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection because the server stops."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._head_complete or self.transport.is_closing():
            return
        self._received_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # the offer of another protocol is ignored
        except httptools.HttpParserError:
            if not self._head_complete:
                self._refuse(b"400 Bad Request", b"not an HTTP/1.x request\n")
            return
        if not self._head_complete and self._received_bytes > HEAD_BYTES:
            self._refuse_head()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + len(b": \r\n")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._head_complete:  # a second request behind the first gets no answer
            return
        self._head_complete = True
        if self._head_bytes > HEAD_BYTES:
            self._refuse_head()
            return
        self._stop_timer()
        self.flow.pause_reading()
        super().on_headers_complete()
        self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Ignore a body: no route reads one."""

    def on_message_complete(self) -> None:
        """Do nothing: the end of the head has started the answer."""

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._close_after(SEND_TIMEOUT_S)

    def _refuse_head(self) -> None:
        self._refuse(b"431 Request Header Fields Too Large", b"headers too large\n")

    def _refuse(self, status: bytes, reason: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(reason), reason)
        )
        self.transport.close()
        self._close_after(SEND_TIMEOUT_S)

    def _close_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
