"""One call of a gRPC client: its API key, its deadline, its message and its status.

    headers ─ key? room? ─▶ read ─▶ write ... ─▶ status
                 └─▶ refused, the message unread

A client that disconnects cancels the task that serves the call. Every exception becomes a status;
one that is no BatonError becomes an internal error. Knows no method's meaning. gRPC's own
exceptions do not leave this module.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.router.answers.request_handler import SEND_S, ClientGone
from baton.router.client_access.client_identity import (
    ApiKeys,
    client_label,
    missing_key,
    new_request_id,
)
from baton.router.client_access.upload import UPLOAD_TIMEOUT_S, Upload, awaiting_upload
from baton.router.grpc_frontend.reply import REQUEST_ID, grpc_status
from baton.router.grpc_frontend.wire import message_of
from baton.router.requests.admission import Admission
from baton.router.requests.body_budget import HeldBody
from baton.router.requests.loop_budget import LoopBudget
from baton.runtime import logs
from baton.runtime.config import RouterConfig
from baton.runtime.errors import BatonError, Cancelled, InvalidRequest, Overloaded, RateLimited
from baton.runtime.telemetry.tracing import RESPONSE_HEADER

DEADLINE_MARGIN_S = 0.01  # before the client's own clock ends the call, so that it gets a reason
MAX_KEYLESS_CALLS = 256
UNKNOWN_PROGRESS_S = 0.25  # then a message may have arrived up to its last byte: gRPC does not say
_Message = TypeVar("_Message", bound=Message)
_Context = grpc.aio.ServicerContext[Any, Any]
_CALL_ENDED = (grpc.aio.BaseError, asyncio.InvalidStateError)  # raised when the call has ended

log = logs.get(__name__)


def _nothing() -> None:
    pass


class ClientCall:
    """`tenant` is the digest of the call's API key, empty if none is required. `arrival_s` is by
    `time.perf_counter()`, `begun_s` and `deadline_s` by the loop's clock. `config` bounds the
    call's time and its message."""

    def __init__(
        self,
        context: _Context,
        request_id: str,
        given: dict[str, str],
        config: RouterConfig,
        turns: LoopBudget,
    ) -> None:
        self._context = context
        self._turns = turns
        self._given = given
        self._max_bytes = config.max_body_bytes
        self._begun = False
        self.request_id = request_id
        self.trace_response: str | None = None  # the ids of its span, if it has one
        self.tenant = b""
        self.arrival_s = time.perf_counter()
        self.begun_s = asyncio.get_running_loop().time()
        left_s: float | None = context.time_remaining()
        longest_s = config.request_s
        allowed_s = longest_s if left_s is None else min(longest_s, left_s - DEADLINE_MARGIN_S)
        self.deadline_s = asyncio.get_running_loop().time() + allowed_s

    def header(self, name: str) -> str:
        return self._given.get(name, "")

    async def read(
        self,
        message_type: type[_Message],
        body: HeldBody,
        timeout_s: float = UPLOAD_TIMEOUT_S,
        admission: Admission | None = None,
    ) -> _Message:
        """Return the client's message. Raises InvalidRequest if none comes in time, Overloaded if
        it has to make room, RateLimited if the budget for bodies is used up."""
        message = await self.read_next(message_type, body, timeout_s, admission)
        if message is None:
            raise InvalidRequest("the call came without a message: send one")
        return message

    async def read_next(
        self,
        message_type: type[_Message],
        body: HeldBody,
        timeout_s: float = UPLOAD_TIMEOUT_S,
        admission: Admission | None = None,
    ) -> _Message | None:
        """Return the client's next message, or None if it sends no more. Raises the same as
        `read`."""
        try:
            async with awaiting_upload("the message", timeout_s, body, admission) as upload:
                sent: Any = await self._read_counted(body, upload)
        except _CALL_ENDED as error:
            raise ClientGone from error
        if not isinstance(sent, bytes):
            return None
        body.hold(len(sent))
        return await self._turns.run(len(sent), message_of, sent, message_type)

    async def _read_counted(self, body: HeldBody, upload: Upload) -> Any:
        """Read the message; a slow one counts with the largest size that it may have."""

        def count() -> None:
            try:
                body.hold(self._max_bytes)
            except RateLimited as error:
                upload.give_up(error)

        timer = asyncio.get_running_loop().call_later(UNKNOWN_PROGRESS_S, count)
        try:
            return await self._context.read()  # bounded by `awaiting_upload`
        finally:
            timer.cancel()

    async def write(self, message: Message, sending: Callable[[], None] = _nothing) -> None:
        """Send a message; `sending` is called before the client can have it. Raises ClientGone if
        the client does not accept it."""
        try:
            async with asyncio.timeout(SEND_S):
                if not self._begun:
                    self._begun = True
                    await self._context.send_initial_metadata(self._initial_metadata())
                body = message.SerializeToString()
                sending()
                await self._context.write(body)
        except (TimeoutError, *_CALL_ENDED) as error:
            raise ClientGone from error

    def _initial_metadata(self) -> tuple[tuple[str, str], ...]:
        own = (REQUEST_ID, self.request_id)
        if self.trace_response is None:
            return (own,)
        return own, (RESPONSE_HEADER, self.trace_response)

    async def end_with(self, error: BatonError) -> None:
        """End a call with the status of an error. Raises gRPC's own exception for it."""
        code, message, trailers = grpc_status(error, self.request_id)
        async with asyncio.timeout(SEND_S):
            await self._context.abort(code, message, trailers)


Method = Callable[[ClientCall], Awaitable[None]]


class CallGuard:
    """Admits calls: with an API key if keys are required, at most `max_connections` of the
    router's settings at once;
    and at most MAX_KEYLESS_CALLS more of those that need no key."""

    def __init__(self, config: RouterConfig, turns: LoopBudget) -> None:
        self._keys = ApiKeys(config.api_keys)
        self._config = config
        self._turns = turns
        self._max_calls = {False: config.max_connections, True: MAX_KEYLESS_CALLS}  # keyless?
        self._calls = {False: 0, True: 0}

    def handler(self, method: Method, keyless: bool = False) -> Any:
        """Return gRPC's handler for `method`; a `keyless` one needs no API key. The message comes
        as a stream of one, so that a call can be refused before its message is read."""

        async def handle(_: Any, context: _Context) -> None:
            metadata = context.invocation_metadata() or ()
            given = {key: value for key, value in metadata if isinstance(value, str)}
            call = ClientCall(context, new_request_id(), given, self._config, self._turns)
            label = client_label(call.header(REQUEST_ID).encode())
            with logs.bind_request(call.request_id, client_label=label or ""):
                self._calls[keyless] += 1
                try:
                    if not keyless:
                        self._check_key(call)
                    if self._calls[keyless] > self._max_calls[keyless]:
                        raise Overloaded("too many calls are open: try again later")
                    await method(call)
                except BatonError as error:
                    await call.end_with(error)
                except ClientGone:
                    await call.end_with(Cancelled("the client accepts no more messages"))
                except Exception as error:
                    # A defect ends its own call, and the log has it: the server serves the others.
                    log.error("internal error raised", error=logs.fault_of(error))
                    await call.end_with(BatonError("unexpected"))
                finally:
                    self._calls[keyless] -= 1

        return grpc.stream_stream_rpc_method_handler(handle)

    def _check_key(self, call: ClientCall) -> None:
        tenant = self._keys.tenant(call.header("authorization").encode())
        if tenant is None:
            raise missing_key()
        call.tenant = tenant
