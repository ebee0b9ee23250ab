"""HTTP on a socket: uvicorn's protocol, with bounds on what comes before a request's body.

A head (request line and headers) must be small and arrive soon, or the connection is closed:
uvicorn alone would wait for a head of any size, for any time. The same holds for the rest of a body
that no route reads. The number of requests that wait on a connection is limited, since one read may
hold thousands. The number of connections is limited: a surplus one is answered 503 and closed,
unless it asks for health. Bytes that are not HTTP get an error like any other, behind the answers
to earlier requests. A client that does not read its answers is disconnected, and a client that
disconnects ends all of its requests. An offer of another protocol is ignored.
Owned by one connection; the event loop calls everything here.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import cast

import httptools
import orjson
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.router.answers.request_handler import SEND_S
from baton.router.client_access.error_body import error_body
from baton.runtime.errors import BatonError, InvalidRequest, Overloaded

HEAD_BYTES = 64 << 10  # of an incomplete head without a read of other bytes, or of a complete one
MAX_HEADERS = 256  # of one head
MAX_PIPELINED = 32  # requests without a complete answer, of one connection
HEAD_TIMEOUT_S = 20.0
ALWAYS_SERVED = tuple(  # under any load
    b"%b /%b " % (method, path)
    for method in (b"GET", b"HEAD")
    for path in (b"health", b"livez", b"readyz", b"metrics")
)
SEND_BYTES = 64 << 10  # or all: a client that reads less in SEND_S is disconnected
SURPLUS_TIMEOUT_S = 1.0  # in which a surplus connection may send a request, to get an answer
FRAMING = (b"content-length", b"transfer-encoding")


class RequestRefused(Exception):
    """The connection has refused what the parser reads; this ends the read."""


class UpgradeIgnoringParser(httptools.HttpRequestParser):
    """Continues with HTTP/1.1 after a head with `Upgrade`, which a server may ignore (RFC 9110,
    7.8). The library stops there, and would take a body for the next request. Java's client sends
    this header with each request."""

    def __init__(self, connection: BoundedHttpProtocol) -> None:
        super().__init__(connection)
        self._connection = connection
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        parser, left = self, memoryview(data)
        while left:
            try:
                super(UpgradeIgnoringParser, parser).feed_data(left)
                return
            except httptools.HttpParserUpgrade as offer:
                parser = self._connection.ignore_upgrade()
                left = left[offer.args[0] :]


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. `_head_bytes` counts the bytes since the last complete head, `_tail_bytes`
    those of them that belong to no body, `_field_bytes` the URL and headers of the head being read.
    `_head_alone`: the bytes being read belong to one head.
    `_unsent_bytes` were not read by the client when `_send_timer` was set; the timer runs while
    there are any. `_answering` is the request that is being answered, the first of the pipelined
    ones; `cycle` is the last. `_refusal` is the error answer to what came after that, to be sent
    behind it; after a refusal nothing more is read. `_in_made_head`: the parser reads a head that
    this class has made."""

    _surplus = False
    _head_open = True
    _head_alone = True
    _head_bytes = 0
    _tail_bytes = 0
    _field_bytes = 0
    _unsent_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None
    _refusal: bytes | None = None
    _in_made_head = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvicorn only serves streams
        super().connection_made(transport)
        self.parser = UpgradeIgnoringParser(self)
        # so that `pause_writing` is called for any unsent byte
        transport.set_write_buffer_limits(high=0)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self.connections.discard(self)
            self._surplus = True
            self._head_timer = self.loop.call_later(SURPLUS_TIMEOUT_S, self._turn_away)
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_send_timer()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.pipeline.clear()  # these requests have no client any more
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._surplus and not self._head_bytes and not data.startswith(ALWAYS_SERVED):
            self._turn_away()
            return
        self._tail_bytes += len(data)
        self._head_alone = self._head_open
        super().data_received(data)
        if self._refusal is not None:
            return
        if not self._head_open and self._tail_bytes > HEAD_BYTES:
            self.transport.close()  # endless trailers
        if self.transport.is_closing():
            return
        if self._head_timer is None and self._answered() and not self.timeout_keep_alive_task:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_late)
        if self._head_open and self._head_alone:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse_head(f"the headers are larger than {HEAD_BYTES} bytes: send less")

    def on_response_complete(self) -> None:
        last = not self.pipeline
        super().on_response_complete()
        if last and self._refusal is not None and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.close()
        if self._surplus:
            self.transport.close()

    def ignore_upgrade(self) -> UpgradeIgnoringParser:
        """Return the parser that reads what follows a head that offers another protocol: its body
        first. It is a new one: after `Connection: close` the last one reads no body."""
        self.parser = parser = UpgradeIgnoringParser(self)
        framing = [line for line in self.headers if line[0] in FRAMING]
        if framing:
            head = b"".join(b"%s: %s\r\n" % line for line in framing)
            self._in_made_head = True
            self.cycle.more_body = True  # the request's task has not begun
            httptools.HttpRequestParser.feed_data(parser, b"POST / HTTP/1.1\r\n" + head + b"\r\n")
            self._in_made_head = False
        return parser

    def on_message_begin(self) -> None:
        if self._in_made_head:
            return
        unanswered = len(self.pipeline) + (self.cycle is not None and not self._answered())
        if unanswered >= MAX_PIPELINED:
            self._refuse(
                b"400 Bad Request",
                f"{unanswered} requests wait for answers on this connection: read some first",
            )
            raise RequestRefused
        super().on_message_begin()
        self._field_bytes = 0
        self.scope["state"]["begun_s"] = self.loop.time()
        self._expect_head()

    def on_url(self, url: bytes) -> None:
        if not self._in_made_head:
            self._add_field(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_open:  # trailers after a chunked body are dropped
            self._add_field(len(name) + len(value))
            super().on_header(name, value)
            if len(self.headers) > MAX_HEADERS:
                self._refuse_head(f"there are over {MAX_HEADERS} headers: send fewer")
                raise RequestRefused

    def _add_field(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > HEAD_BYTES:
            self._refuse_head(f"the headers are larger than {HEAD_BYTES} bytes: send less")
            raise RequestRefused

    def on_headers_complete(self) -> None:
        if self._in_made_head:
            return
        self._head_open = self._head_alone = False
        self._head_bytes = self._tail_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":  # uvicorn would always close it
            self.cycle.keep_alive = self.parser.should_keep_alive()
        if len(self.pipeline) == 1:  # uvicorn would stop reading, and not see a disconnect
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._tail_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        if self._refusal is None and not self.transport.is_closing():  # else refused already
            self._refuse(b"400 Bad Request", "this is not a valid HTTP/1.1 request")

    def _answered(self) -> bool:
        """Return whether the last request has been answered."""
        return self.cycle is not None and self.cycle.response_complete

    def _expect_head(self) -> None:
        self._head_open = True
        if not self._surplus:  # whose shorter timer runs
            self._stop_timer()
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self._answered():
            self._expect_head()  # an earlier request is being answered
        elif not self._head_open:
            self.transport.close()  # the bytes after the answer were no head
        elif not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", f"no request came within {HEAD_TIMEOUT_S:g} s")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expect_reader(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(SEND_S, self._reader_late)

    def _reader_late(self) -> None:
        if self._unsent_bytes - self.transport.get_write_buffer_size() < SEND_BYTES:
            self.transport.abort()  # `close` would wait for the client for ever
        else:
            self._expect_reader()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _turn_away(self) -> None:
        if not self.transport.is_closing():
            error = Overloaded("too many connections are open: close some, or try again later")
            self._answer(b"503 Service Unavailable\r\nretry-after: 1", error)

    def _refuse(self, status: bytes, message: str) -> None:
        self._answer(status, InvalidRequest(message))

    def _refuse_head(self, message: str) -> None:
        self._refuse(b"431 Request Header Fields Too Large", message)

    def _owed(self) -> bool:
        """Return whether earlier requests have to be answered before what is being read."""
        if self.cycle is None or self._answered():
            return False
        if self._head_open or not self.cycle.more_body:
            return True
        return self._answering is not self.cycle

    def _answer(self, status: bytes, error: BatonError) -> None:
        """Send the last answer on this connection; `status` may include headers."""
        self._stop_timer()
        body = orjson.dumps(error_body(error))
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % len(body)
        )
        answer = b"HTTP/1.1 " + status + b"\r\n" + head + body
        if self._owed():
            self._refusal = answer
            if not self._head_open and self.cycle.more_body:
                self.pipeline.popleft()  # the refusal is its answer
        else:
            self.transport.write(answer)
            self.transport.close()
