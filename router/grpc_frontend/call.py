"""One call of a gRPC client, guarded: who calls, by when, its one message, and how it ends.

    headers ─ key? room? ─▶ read ─▶ write ... ─▶ status
                 └─▶ refused, the message unread

A client that leaves cancels the task that serves the call. Whatever is raised becomes a status;
what is not our error is one inside the server. Knows no method's meaning. gRPC's own exceptions
end here.
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
from baton.router.grpc_frontend.reply import REQUEST_ID, status_of
from baton.router.grpc_frontend.wire import message_of
from baton.router.requests.admission import Admission
from baton.router.requests.body_budget import HeldBody
from baton.router.requests.loop_budget import LoopBudget
from baton.runtime import logs
from baton.runtime.config import RouterConfig
from baton.runtime.errors import BatonError, Cancelled, InvalidRequest, Overloaded, RateLimited

EARLY_S = 0.01  # before the client's own clock ends the call: then it is told why
OPEN_CALLS = 256
UNSEEN_S = 0.25  # gRPC does not tell what has come of a message: then it may be all but a byte
_Shape = TypeVar("_Shape", bound=Message)
_Context = grpc.aio.ServicerContext[Any, Any]
_OVER = (grpc.aio.BaseError, asyncio.InvalidStateError)  # the call has ended beneath us

log = logs.get(__name__)


class Call:
    """`tenant` is the digest of the key that it came with, empty where none is asked for.
    `arrival_s` is `time.perf_counter()`'s, `deadline_s` the loop's clock. `config` bounds the
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
        self.tenant = b""
        self.arrival_s = time.perf_counter()
        left_s: float | None = context.time_remaining()
        longest_s = config.request_s
        allowed_s = longest_s if left_s is None else min(longest_s, left_s - EARLY_S)
        self.deadline_s = asyncio.get_running_loop().time() + allowed_s

    def header(self, name: str) -> str:
        return self._given.get(name, "")

    async def read(
        self,
        shape: type[_Shape],
        body: HeldBody,
        limit_s: float = UPLOAD_TIMEOUT_S,
        admission: Admission | None = None,
    ) -> _Shape:
        """The client's message, if it is admitted. Raises InvalidRequest if there is none, in
        time; Overloaded if it has to make room, RateLimited if the budget for bodies is used up."""
        message = await self.read_next(shape, body, limit_s, admission)
        if message is None:
            raise InvalidRequest("the call came without a message: send one")
        return message

    async def read_next(
        self,
        shape: type[_Shape],
        body: HeldBody,
        limit_s: float = UPLOAD_TIMEOUT_S,
        admission: Admission | None = None,
    ) -> _Shape | None:
        """Return the client's next message, or None where it sends no more. Raises as `read`."""
        try:
            async with awaiting_upload("the message", limit_s, body, admission) as upload:
                sent: Any = await self._read_counted(body, upload)
        except _OVER as error:
            raise ClientGone from error
        if not isinstance(sent, bytes):
            return None
        body.hold(len(sent))
        return await self._turns.run(len(sent), message_of, sent, shape)

    async def _read_counted(self, body: HeldBody, upload: Upload) -> Any:
        """Read the message; one that takes long counts as the largest that it may become."""

        def count() -> None:
            try:
                body.hold(self._max_bytes)
            except RateLimited as error:
                upload.give_up(error)

        timer = asyncio.get_running_loop().call_later(UNSEEN_S, count)
        try:
            return await self._context.read()  # bounded by `awaiting_upload`
        finally:
            timer.cancel()

    async def write(self, message: Message) -> None:
        """Raises ClientGone if the client does not take it."""
        try:
            async with asyncio.timeout(SEND_S):
                if not self._begun:
                    self._begun = True
                    await self._context.send_initial_metadata(((REQUEST_ID, self.request_id),))
                await self._context.write(message.SerializeToString())
        except (TimeoutError, *_OVER) as error:
            raise ClientGone from error

    async def end_with(self, error: BatonError) -> None:
        """The status of a call that failed. Raises gRPC's own exception for it."""
        code, message, trailers = status_of(error, self.request_id)
        async with asyncio.timeout(SEND_S):
            await self._context.abort(code, message, trailers)


Method = Callable[[Call], Awaitable[None]]


class Doorkeeper:
    """Lets calls in: with a key, where keys are asked for, and at most `router.max_connections` at
    once; of those that everyone may make at most OPEN_CALLS beside them."""

    def __init__(self, config: RouterConfig, turns: LoopBudget) -> None:
        self._keys = ApiKeys(config.api_keys)
        self._config = config
        self._turns = turns
        self._most = {False: config.max_connections, True: OPEN_CALLS}
        self._calls = {False: 0, True: 0}

    def handler(self, method: Method, everyone: bool = False) -> Any:
        """gRPC's handler for `method`; `everyone`: without a key. It takes the message as a
        stream of one, so that a call is refused before its message is read."""

        async def handle(_: Any, context: _Context) -> None:
            metadata = context.invocation_metadata() or ()
            given = {key: value for key, value in metadata if isinstance(value, str)}
            call = Call(context, new_request_id(), given, self._config, self._turns)
            label = client_label(call.header(REQUEST_ID).encode())
            with logs.bind_request(call.request_id, client_label=label):
                self._calls[everyone] += 1
                try:
                    if not everyone:
                        self._check_key(call)
                    if self._calls[everyone] > self._most[everyone]:
                        raise Overloaded("too many calls are open: try again later")
                    await method(call)
                except BatonError as error:
                    await call.end_with(error)
                except ClientGone:
                    await call.end_with(Cancelled("the client takes nothing any more"))
                except Exception as error:
                    log.error("unexpected error", error=repr(error))
                    await call.end_with(BatonError("unexpected"))
                finally:
                    self._calls[everyone] -= 1

        return grpc.stream_stream_rpc_method_handler(handle)

    def _check_key(self, call: Call) -> None:
        tenant = self._keys.tenant(call.header("authorization").encode())
        if tenant is None:
            raise missing_key()
        call.tenant = tenant
