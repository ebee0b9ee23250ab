"""Bad requests before their fields are looked at: bodies, their sizes, routes, ids, tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from structlog.testing import capture_logs

from baton.router.requests.validator import Validator
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness
from tests.support.router_process import FAST_ROUTER, StartRouter

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"


def good(route: str) -> JsonObject:
    if route == CHAT:
        return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    return {"model": "tiny", "prompt": "hi"}


def check_error(reply: httpx.Response) -> JsonObject:
    error: JsonObject = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


RAW: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b"[]", "object"),
    (b"null", "object"),
    (b'{"model":"tiny","prompt":"\xff\xfe"}', "JSON"),
    (b'{"model":"tiny","prompt":"\\ud800"}', "JSON"),
    (b'{"model":"tiny","prompt":"a","temperature":NaN}', "JSON"),
    (b'{"model":"tiny","prompt":"a","temperature":1e999}', "JSON"),
    (b"[" * 30_000, "JSON"),
    (b"[" * 100_000, "lists"),
    (b'{"a":' * 5000 + b"1" + b"}" * 5000, "JSON"),
]


async def test_bodies_that_are_no_request(router: StartRouter) -> None:
    async with router() as running:
        for body, word in RAW:
            for route in (CHAT, COMPLETE, "/tokenize", "/detokenize"):
                reply = await running.http.post(route, content=body)
                assert reply.status_code == 400, (route, body[:40], reply.text)
                assert word in check_error(reply)["message"]


async def test_routes_and_methods(router: StartRouter) -> None:
    async with router() as running:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("POST", "/", 404),
            ("GET", CHAT, 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v1/models/other", 404),
        ):
            reply = await running.http.request(method, path)
            assert reply.status_code == status, (method, path)
            check_error(reply)
        assert (await running.http.get("/v1/models/tiny")).json()["id"] == "tiny"
        assert "baton_requests_total" in (await running.http.get("/metrics")).text
        assert (await running.http.get("/version")).json()["version"]


async def test_large_bodies_are_refused(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, max_body_bytes=4096)) as running:
        body = json.dumps({**good(COMPLETE), "user": "x" * 5000}).encode()
        declared = await running.http.post(COMPLETE, content=body)
        assert declared.status_code == 413
        assert "4096" in check_error(declared)["message"]

        async def chunked() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 500):
                yield body[start : start + 500]

        assert (await running.http.post(COMPLETE, content=chunked())).status_code == 413
        assert (await running.complete(max_tokens=1)).status_code == 200


async def test_the_default_limit_is_8_mib_to_the_byte(router: StartRouter) -> None:
    limit = 8 << 20
    start, end = b'{"model": "tiny", "prompt": "', b'"}'
    async with router() as running:
        for route in (CHAT, COMPLETE):
            over = start + b"a" * (limit + 1 - len(start) - len(end)) + end
            refused = await running.http.post(route, content=over)
            assert refused.status_code == 413
            assert str(limit) in check_error(refused)["message"]
            whole = b"{" + b" " * (limit - 2) + b"}"
            assert (await running.http.post(route, content=whole)).status_code == 400
        assert (await running.complete(max_tokens=1)).status_code == 200


async def test_an_endless_body_is_refused_when_it_passes_the_limit(
    router: StartRouter,
) -> None:
    async with router(config=replace(FAST_ROUTER, max_body_bytes=4096)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        writer.write(b"1000\r\n" + b" " * 0x1000 + b"\r\n" + b"10\r\n" + b" " * 16 + b"\r\n")
        async with asyncio.timeout(20):  # the body never ends, the answer comes all the same
            assert b"413" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_template_refusals_name_messages(router: StartRouter) -> None:
    async with router() as running:
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert (await running.http.post("/tokenize", json=body)).status_code == 200
        both = await running.http.post("/tokenize", json={**body, "prompt": "x"})
        assert both.status_code == 400
        text = "größer 🎉 <|im_start|>"
        tokens = (await running.http.post("/tokenize", json={"prompt": text})).json()["tokens"]
        back = await running.http.post("/detokenize", json={"tokens": tokens})
        assert back.json() == {"prompt": text}
        bad = await running.http.post("/detokenize", json={"tokens": [1, 99_999]})
        assert bad.status_code == 400 and check_error(bad)["param"] == "tokens[1]"


async def test_a_bug_is_logged_without_the_text_of_the_client(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> str:
        return "my secret \ud83d".encode().decode()

    monkeypatch.setattr(Validator, "text", broken)
    async with router() as running:
        with capture_logs() as reported:
            reply = await running.http.post("/detokenize", json={"tokens": [1]})
        assert reply.status_code == 500 and check_error(reply)["code"] == "internal_error"
    (event,) = [event for event in reported if event["event"] == "internal error raised"]
    assert event["error"].startswith(f"UnicodeEncodeError at {__file__}:")
    assert "secret" not in str(event)


async def test_a_client_that_leaves_ends_what_it_asked_to_detokenize(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def held(*_: object) -> None:
        begun.set()
        try:
            await go.wait()
        finally:
            ended.set()

    monkeypatch.setattr(Validator, "text", held)
    async with router() as running:
        asking = asyncio.create_task(running.http.post("/detokenize", json={"tokens": [1]}))
        try:
            async with asyncio.timeout(20 * slowness()):
                await begun.wait()
                asking.cancel()  # closes its connection
                await ended.wait()
        finally:
            go.set()


def minted(reply: httpx.Response) -> str:
    """What follows `req-`: 128 bits of the server's own."""
    return str(reply.headers["x-request-id"]).removeprefix("req-")


async def test_client_ids_are_labels_only(router: StartRouter) -> None:
    async with router() as running:
        for label in ("mine-1", "x" * 500, "bad\tone"):
            reply = await running.http.get("/livez", headers={"x-request-id": label})
            assert reply.headers["x-request-id"].startswith("req-")
            assert len(reply.headers.get_list("x-request-id")) == 1
        asked = {minted(await running.http.get("/livez")) for _ in range(50)}
        assert len(asked) == 50 and all(len(bytes.fromhex(number)) == 16 for number in asked)


async def test_a_route_with_a_slash_too_many_is_unknown(router: StartRouter) -> None:
    async with router() as running:
        reply = await running.http.post(f"{COMPLETE}/", json=good(COMPLETE))
        assert reply.status_code == 404 and COMPLETE in check_error(reply)["message"]
        reply = await running.http.put(COMPLETE, json=good(COMPLETE))
        assert (reply.status_code, check_error(reply)["code"]) == (405, "method_not_allowed")


async def test_more_tokens_than_the_context_are_not_detokenized(router: StartRouter) -> None:
    async with router() as running:
        reply = await running.http.post("/detokenize", json={"tokens": [5] * 100_000})
        assert reply.status_code == 400 and check_error(reply)["param"] == "tokens"
