"""HTTP on a socket: uvicorn's protocol, with bounds on what comes before a request's body.

A head (request line and headers) is small and comes soon, or the connection ends: uvicorn alone
would keep a head of any size, for any time. So does what is left of a body that nobody reads any
more. Nor are there more connections than a limit: one more is answered 503 and closed, unless it
asks for health. What is not HTTP is answered as every other error, and in its turn: behind the
answers to what came before it. Who does not read what he is sent is cut off, and who leaves ends
all that he has asked for. An offer to speak another protocol is passed over.
Owned by one connection; the event loop calls everything here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httptools
import orjson
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.router.answers.request_handler import SEND_S
from baton.router.client_access.error_body import error_body
from baton.runtime.errors import BatonError, InvalidRequest, Overloaded

HEAD_BYTES = 64 << 10  # of an incomplete head, beside what came in one read with other things
HEAD_S = 20.0
ALWAYS = tuple(  # whatever the load
    b"%b /%b " % (method, path)
    for method in (b"GET", b"HEAD")
    for path in (b"health", b"livez", b"readyz", b"metrics")
)
SEND_BYTES = 64 << 10  # or all there is: who takes less in SEND_S is gone
SURPLUS_S = 1.0  # for a connection too many to ask something, so that it gets an answer
FRAMING = (b"content-length", b"transfer-encoding")


class StayingParser(httptools.HttpRequestParser):
    """Reads on as HTTP/1.1 behind a head with `Upgrade`, which a server may ignore (RFC 9110,
    7.8). The library stops there, and would take a body for the next request: Java's client
    makes this offer with each request."""

    def __init__(self, connection: BoundedHttp) -> None:
        super().__init__(connection)
        self._connection = connection
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        left = memoryview(data)
        while left:
            try:
                super().feed_data(left)
                return
            except httptools.HttpParserUpgrade as offer:
                self._connection.stay(super().feed_data)
                left = left[offer.args[0] :]


class BoundedHttp(HttpToolsProtocol):
    """One connection. `_head_bytes` counts what came since the last complete head, `_tail_bytes`
    what came since then that was no body. `_head_alone`: what is being read belongs to one head.
    `_unsent_bytes` were not taken by the client when `_send_timer` was set, which runs while
    there are any. `_answering` is the request that is being answered, the first of those that
    are pipelined; `cycle` is the last. `_refusal` is what was wrong after that, to be told once
    it is answered: nothing is read any more. `_staying`: a head is read that nobody sent."""

    _surplus = False
    _head_open = True
    _head_alone = True
    _head_bytes = 0
    _tail_bytes = 0
    _unsent_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None
    _refusal: bytes | None = None
    _staying = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = StayingParser(self)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of every byte
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self.connections.discard(self)
            self._surplus = True
            self._head_timer = self.loop.call_later(SURPLUS_S, self._turn_away)
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_send_timer()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.pipeline.clear()  # for nobody
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
        if self._surplus and not self._head_bytes and not data.startswith(ALWAYS):
            self._turn_away()
            return
        self._tail_bytes += len(data)
        self._head_alone = self._head_open
        super().data_received(data)
        if self._refusal is not None:
            return
        if not self._head_open and self._tail_bytes > HEAD_BYTES:
            self.transport.close()  # trailers without end: nobody waits for them
        if self.transport.is_closing():
            return
        if self._head_timer is None and self._answered() and not self.timeout_keep_alive_task:
            self._head_timer = self.loop.call_later(HEAD_S, self._head_late)
        if self._head_open and self._head_alone:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(
                    b"431 Request Header Fields Too Large",
                    f"the headers are larger than {HEAD_BYTES} bytes: send less",
                )

    def on_response_complete(self) -> None:
        last = not self.pipeline
        super().on_response_complete()
        if last and self._refusal is not None and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.close()
        if self._surplus:
            self.transport.close()

    def stay(self, feed: Callable[[bytes], None]) -> None:
        """The parser has read a head with an offer to leave HTTP/1.1: let it read the body."""
        framing = [line for line in self.headers if line[0] in FRAMING]
        if framing:
            self._staying = True
            feed(b"POST / HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % line for line in framing))
            self.cycle.more_body = True  # its task has not begun
            feed(b"\r\n")
            self._staying = False

    def on_message_begin(self) -> None:
        if self._staying:
            return
        super().on_message_begin()
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_open:  # trailers after a chunked body are dropped: nobody reads them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._staying:
            return
        self._head_open = self._head_alone = False
        self._head_bytes = self._tail_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":  # uvicorn would close it in any case
            self.cycle.keep_alive = self.parser.should_keep_alive()
        if len(self.pipeline) == 1:  # uvicorn would read no further, and not see the client leave
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._tail_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", "this is not a valid HTTP/1.1 request")

    def _answered(self) -> bool:
        """No request is under way, and there was one."""
        return self.cycle is not None and self.cycle.response_complete

    def _expect_head(self) -> None:
        self._head_open = True
        if not self._surplus:  # else a timer runs, and shorter
            self._stop_timer()
            self._head_timer = self.loop.call_later(HEAD_S, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self._answered():
            self._expect_head()  # an answer to an earlier request is under way
        elif not self._head_open:
            self.transport.close()  # something came after an answer that was no head
        elif not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", f"no request came within {HEAD_S:g} s")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expect_reader(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(SEND_S, self._reader_late)

    def _reader_late(self) -> None:
        if self._unsent_bytes - self.transport.get_write_buffer_size() < SEND_BYTES:
            self.transport.abort()  # `close` would wait for it for ever
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

    def _owed(self) -> bool:
        """Answers are to be given before one to what is being read."""
        if self.cycle is None or self._answered():
            return False
        if self._head_open or not self.cycle.more_body:
            return True
        return self._answering is not self.cycle

    def _answer(self, status: bytes, error: BatonError) -> None:
        """The last answer on this connection; `status` may hold headers."""
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
                self.pipeline.popleft()  # this is its answer
        else:
            self.transport.write(answer)
            self.transport.close()
