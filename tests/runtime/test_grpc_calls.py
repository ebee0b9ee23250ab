"""Calls over real gRPC: the token that each needs, and errors that keep their class."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from baton.runtime import errors
from baton.runtime.grpc_links import (
    abort,
    credentials,
    open_channel,
    open_server,
    translate,
)
from baton.runtime.links import LinkClosed
from tests.support.grpc_loopback import (
    LIMIT_S,
    TOKEN,
    ServerContext,
    echo,
    linked,
    served,
    within,
)

pytestmark = pytest.mark.timed


async def test_the_wrong_token_is_refused_and_named() -> None:
    async with linked(echo, token="another") as link:
        with pytest.raises(LinkClosed, match="BATON_TOKEN"):
            await within(link.receive())
        with pytest.raises(LinkClosed, match="BATON_TOKEN"):
            await within(link.send(b"x"))


@pytest.mark.parametrize("metadata", [(), credentials("another"), credentials("")])
async def test_calls_of_every_kind_need_the_token(metadata: tuple[tuple[str, str], ...]) -> None:
    async def answer(request: bytes, context: ServerContext) -> bytes:
        return b"secret"

    async with served(unary=answer) as address, open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/t/Unary")(b"", metadata=metadata, timeout=LIMIT_S)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert isinstance(translate(refused.value), errors.ConfigError)
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_stream("/t/Out")(b"", metadata=metadata, timeout=LIMIT_S).read()
        right = credentials(TOKEN)
        reply = await channel.unary_unary("/t/Unary")(b"", metadata=right, timeout=LIMIT_S)
        assert reply == b"secret"


@pytest.mark.parametrize(
    "raised",
    [
        errors.InvalidRequest("no"),
        errors.OutOfBlocks("full"),
        errors.Incompatible("layers differ"),
        errors.LeaseLost("späť"),
        errors.Overloaded("later"),
        errors.ModelError("shard"),
    ],
    ids=lambda error: error.code,
)
async def test_our_errors_keep_their_class_over_a_call(raised: errors.BatonError) -> None:
    async def fail(_: bytes, context: ServerContext) -> None:
        await abort(context, raised)

    async with served(unary=fail) as address, open_channel(address) as channel:
        call = channel.unary_unary("/t/Unary")(b"", metadata=credentials(TOKEN), timeout=LIMIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
    back = translate(failed.value)
    assert type(back) is type(raised)
    assert str(back) == str(raised)


async def test_a_foreign_status_or_a_missing_server_is_unavailable() -> None:
    async def broken(_: bytes, context: ServerContext) -> None:
        await context.abort(grpc.StatusCode.INTERNAL, "oops")

    async with served(unary=broken) as address:
        channel = open_channel(address)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary("/t/Unary")(b"", metadata=credentials(TOKEN), timeout=LIMIT_S)
    assert isinstance(translate(failed.value), errors.Unavailable)
    assert "oops" in str(translate(failed.value))
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await channel.unary_unary("/t/Unary")(b"", metadata=credentials(TOKEN), timeout=LIMIT_S)
    assert translate(missing.value).retryable
    await channel.close()


async def test_a_server_accepts_two_tokens() -> None:
    server = open_server("new", also=("old",))
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "t", {"Unary": grpc.unary_unary_rpc_method_handler(_answer)}
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/t/Unary")
        for token in ("new", "old"):
            assert await within(call(b"x", metadata=credentials(token))) == b"x"
        for token in ("", "older"):
            with pytest.raises(grpc.aio.AioRpcError):
                await within(call(b"x", metadata=credentials(token)))
    await server.stop(None)


async def _answer(request: bytes, context: object) -> bytes:
    return request
