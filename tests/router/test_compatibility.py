"""Small things that clients of other servers rely on: routes, codes, connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from baton.router.http_frontend.routes import CHAT_PATH, COMPLETION_PATH, no_route
from tests.support.json_values import JsonObject
from tests.support.router_process import FAST_ROUTER, StartRouter
from tests.support.waiting import eventually

STRICT: JsonObject = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}},
}


async def test_health_says_what_readyz_says(router: StartRouter) -> None:
    async with router() as running:
        for method in (running.http.get, running.http.head):
            assert (await method("/health")).status_code == 200
        await running.workers["decode-0"].die()

        async def red() -> bool:
            return bool((await running.http.get("/health")).status_code == 503)

        await eventually(red)


async def test_models_have_a_root(router: StartRouter) -> None:
    async with router() as running:
        (model,) = (await running.http.get("/v1/models")).json()["data"]
        assert (model["root"], model["parent"]) == ("tiny", None)


async def test_tokenizer_info_holds_template_and_tokens(router: StartRouter) -> None:
    async with router() as running:
        info = (await running.http.get("/tokenizer_info")).json()
        assert info["eos_token"] == "<|im_end|>" and info["model_max_length"] == 4096
        assert "add_generation_prompt" in info["chat_template"]


async def test_tokenizer_info_needs_the_key(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, api_keys=("k",))) as running:
        assert (await running.http.get("/tokenizer_info")).status_code == 401


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "max_tokens": 5000}, "max_tokens"),
        ({"prompt": [5] * 4096}, "prompt"),
        ({"prompt": [5] * 5000}, "prompt"),
        ({"prompt": "a" * 200_000}, "prompt"),
    ],
)
async def test_too_long_a_context_has_its_code(
    router: StartRouter, fields: JsonObject, param: str
) -> None:
    async with (
        router() as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", **fields)
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.param == param


@pytest.mark.parametrize("seed", [2**63, 2**64, -(2**63) - 1, 10**40, 1.5, True])
async def test_a_seed_out_of_range_names_the_range(router: StartRouter, seed: float) -> None:
    async with router() as running:
        reply = await running.complete(seed=seed)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "seed")
        assert error["message"] == "seed: give a whole number from -2**63 to 2**63 - 1"


async def test_strict_tools_are_accepted(
    router: StartRouter, tool_model: Callable[..., Path]
) -> None:
    async with router(tool_model("hermes")) as running:
        assert (await running.chat(tools=[STRICT], max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/chat/completions", CHAT_PATH),
        ("/v1/v1/chat/completions", CHAT_PATH),
        ("/v1/chat/completions/", CHAT_PATH),
        ("/V1/Chat/Completion", CHAT_PATH),
        ("/v1/responses", CHAT_PATH),
        ("/v1/messages", CHAT_PATH),
        ("/completions", COMPLETION_PATH),
        ("/v1/completion", COMPLETION_PATH),
        ("/models", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/metrics", "/metrics"),
    ],
)
def test_a_missing_route_names_the_right_one(path: str, right: str) -> None:
    assert str(no_route(path)) == f"there is no route {path}: use {right}"


def test_a_route_like_none_lists_all() -> None:
    message = str(no_route("/" + "x" * 100_000))
    assert len(message) < 1000 and "/v1/models, /tokenize" in message


async def test_a_missing_route_is_404_with_the_right_one(router: StartRouter) -> None:
    async with router() as running:
        reply = await running.http.post("/v1/v1/chat/completions", json={})
        assert reply.status_code == 404
        assert CHAT_PATH in reply.json()["error"]["message"]


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, _, length = head.partition(b"content-length: ")
    return head, await reader.readexactly(int(length.split(b"\r\n")[0]))


async def test_http_1_0_connection_stays_open_if_asked(router: StartRouter) -> None:
    async with router() as running, asyncio.timeout(20):
        host, port = running.url.removeprefix("http://").split(":")
        ask = b"GET /v1/models HTTP/1.0\r\nhost: localhost\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):
            writer.write(ask + b"connection: Keep-Alive\r\n\r\n")
            head, body = await read_answer(reader)
            assert b"connection: keep-alive" in head and b'"tiny"' in body
        writer.write(ask + b"\r\n")  # unasked, it ends
        head, _ = await read_answer(reader)
        assert b"connection: close" in head and await reader.read() == b""
        writer.close()


async def test_http_1_0_stream_ends_its_connection(router: StartRouter) -> None:
    """An answer without a length ends where the connection does."""
    async with router() as running, asyncio.timeout(20):
        host, port = running.url.removeprefix("http://").split(":")
        body = b'{"model":"tiny","prompt":"a","max_tokens":2,"stream":true}'
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\nconnection: keep-alive\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        answer = await reader.read()
        assert b"connection: close" in answer.lower() and b"[DONE]" in answer
        writer.close()
