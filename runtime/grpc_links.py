"""Links over gRPC, the channels and servers beneath them, and their shared secret.

Channels and ports are TLS's (tls.py), unless that is switched off. Every call carries the
cluster's token as well; a server refuses a call without it before any message is read. gRPC's own
exceptions are translated here, and only here.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar, cast

import grpc
import grpc.aio

from baton.runtime.errors import BatonError, ConfigError, Incompatible, Unavailable, by_code
from baton.runtime.links import LinkClosed
from baton.runtime.tls import Tls, advice

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")

TOKEN_KEY = "x-baton-token"
ERROR_KEY = "x-baton-error"
MAX_MESSAGE_BYTES = 64 << 20  # a snapshot part or a long prompt; KV never travels here
MAX_CONNECTIONS = 4096  # of routers and other workers
HANDSHAKE_S = 10  # for TLS and gRPC's handshake
PING_S = 30  # between pings on an idle connection
PONG_S = 10
CLOSE_GRACE_S = 0.5  # for the peer to take the last messages and end its side

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]
# exceptions of grpc.aio for a call that either side or the network has ended
_ENDED = (
    grpc.aio.AioRpcError,
    grpc.aio.BaseError,
    asyncio.InvalidStateError,
    LinkClosed,
)


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """Open a channel; in plain text without `tls` (switched off, or a test)."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = [*CHANNEL_OPTIONS, *tls.channel_options()]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


def credentials(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that every call between Baton's processes carries."""
    return ((TOKEN_KEY, token),)


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry one of the cluster's tokens."""

    def __init__(self, *tokens: str) -> None:
        self._tokens = [token.encode() for token in tokens]

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[A, B] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[A, B] | None:
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata).get(TOKEN_KEY, "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        if handler is None or any(hmac.compare_digest(given_bytes, e) for e in self._tokens):
            return handler
        return _refusal(handler)


def _refusal(handler: grpc.RpcMethodHandler[A, B]) -> grpc.RpcMethodHandler[A, B]:
    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "the call lacks this cluster's token: start all processes with the same BATON_TOKEN",
        )

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


def open_server(
    token: str, max_connections: int = MAX_CONNECTIONS, *, also: tuple[str, ...] = ()
) -> grpc.aio.Server:
    """Return a server for at most `max_connections` routers and workers of the other role. Calls
    with a token of `also` are accepted too: while the token is replaced, two are valid."""
    options = server_options(max_connections)
    return grpc.aio.server(interceptors=[TokenCheck(token, *also)], options=options)


def server_options(max_connections: int) -> list[tuple[str, int]]:
    """Return the options of a gRPC server: its sizes, timeouts and at most `max_connections`."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
        ("grpc.keepalive_time_ms", PING_S * 1000),
        ("grpc.keepalive_timeout_ms", PONG_S * 1000),  # for the peer's kernel, and for itself:
        ("grpc.http2.ping_timeout_ms", PONG_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_port(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    """Let a server listen; the port's number. Without `tls` it takes plain text. Raises
    RuntimeError if the port cannot be had."""
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.server_credentials())


def translate(error: grpc.aio.AioRpcError) -> BatonError:
    """Return one of our errors for a gRPC status."""
    detail = error.details() or error.code().name
    named = dict(error.trailing_metadata() or ()).get(ERROR_KEY)
    if named:
        return by_code(str(named), detail)
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return Incompatible(detail)
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return ConfigError(detail)
    return Unavailable(f"{error.code().name}: {advice(detail)}")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> None:
    """End a call with our error; the client's `translate` gives the same class back."""
    context.set_trailing_metadata(((ERROR_KEY, error.code),))
    await context.abort(getattr(grpc.StatusCode, error.grpc_code), str(error))


class ClientLink(Generic[A, B]):
    """The calling end of a bidirectional call."""

    def __init__(self, call: grpc.aio.StreamStreamCall[A, B]) -> None:
        self._call = call
        self._stream: _Stream[A, B] = _Stream(call.read, call.write)

    async def send(self, message: A) -> None:
        try:
            await self._stream.send(message)
        except LinkClosed as closed:
            raise await self._explained(closed) from closed.__cause__

    async def receive(self) -> B:
        return await self._stream.receive()

    async def close(self) -> None:
        """End the call so that the peer still gets what was sent. (Cancelling at once loses
        it.) A peer that does not end its side within CLOSE_GRACE_S is cut off."""
        if self._stream.closed:
            return
        self._stream.closed = True
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                await self._call.done_writing()
                await self._stream.drain()
        except (TimeoutError, *_ENDED):
            pass  # silent or gone: the cancel below ends the call either way
        finally:
            self._call.cancel()
            self._stream.abandon()

    async def _explained(self, closed: LinkClosed) -> LinkClosed:
        """Return the reason that the status of the call gives: a failed write has none."""
        if self._call.done() and not self._stream.closed:
            code, details = await self._call.code(), await self._call.details()
            return LinkClosed(f"{code.name}: {advice(details or '')}")
        return closed


class ServerLink(Generic[A, B]):
    """The serving end. The call ends when its handler returns, which the owner of the link
    does after `close`. gRPC cancels the handler's task when the caller cancels or dies:
    handlers release what they hold in `finally`."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._stream: _Stream[A, B] = _Stream(context.read, context.write)

    async def send(self, message: A) -> None:
        await self._stream.send(message)

    async def receive(self) -> B:
        return await self._stream.receive()

    async def close(self) -> None:
        self._stream.closed = True
        self._stream.abandon()


class _Stream(Generic[A, B]):
    """Reads and writes of one call, each in a task of its own: gRPC answers the cancelling of
    a read or write by cancelling the whole call, or by losing the message. Here a cancelled
    `receive` leaves its read for the next one."""

    def __init__(
        self, read: Callable[[], Awaitable[object]], write: Callable[[A], Awaitable[None]]
    ) -> None:
        self._read = read
        self._write = write
        self._reading: asyncio.Task[object] | None = None
        self._writing: asyncio.Task[None] | None = None
        self.closed = False

    async def send(self, message: A) -> None:
        if self._writing is not None:
            await _outcome(self._writing)  # of a send that was cancelled
        if self.closed:
            raise LinkClosed("this side ended the stream")
        self._writing = _start(self._write(message))
        await _outcome(self._writing)
        self._writing = None

    async def receive(self) -> B:
        message = None if self.closed else await self._next()
        if self.closed:
            raise LinkClosed("this side ended the stream")
        if message is grpc.aio.EOF:
            raise LinkClosed("the peer ended the stream")
        return cast(B, message)

    async def drain(self) -> None:
        """Read and drop until the peer ends the stream. Raises LinkClosed if it breaks."""
        while await self._next() is not grpc.aio.EOF:
            pass

    def abandon(self) -> None:
        """Give up what is under way; waiting senders and receivers get LinkClosed."""
        for task in (self._reading, self._writing):
            if task is not None:
                task.cancel()

    async def _next(self) -> object:
        reading = self._reading
        if reading is None:
            reading = self._reading = _start(self._read())
        message = await _outcome(reading)
        if message is not grpc.aio.EOF and self._reading is reading:
            self._reading = None
        return message


def _start(work: Awaitable[T]) -> asyncio.Task[T]:
    async def run() -> T:
        return await work

    task = asyncio.get_running_loop().create_task(run())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def _outcome(task: asyncio.Task[T]) -> T:
    """Wait without cancelling the task; its failure or cancellation becomes LinkClosed."""
    if not task.done():
        await asyncio.wait({task})
    if task.cancelled():
        raise LinkClosed("the stream was cancelled")
    try:
        return task.result()
    except _ENDED as error:
        raise LinkClosed(_reason(error)) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {advice(error.details() or '')}"
    return str(error) or type(error).__name__
