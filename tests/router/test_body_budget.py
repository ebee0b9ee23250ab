"""The bytes of bodies are bounded, of one key and of all; silent uploads make room for others."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.router.grpc_frontend import call as grpc_call
from baton.router.requests import body_budget
from baton.router.requests.body_budget import PROGRESS_BYTES, SILENT_S, BodyBudget, HeldBody
from baton.runtime.config import RouterConfig
from baton.runtime.errors import RateLimited
from baton.runtime.settings.checks import declared_settings
from tests.support.router_books import tenants_of
from tests.support.router_process import FAST_ROUTER, StartRouter

KEYS = ("one", "two")
CHUNK = 1 << 16


class Scene:
    """A budget on a clock by hand: `upload` begins one for a tenant, which `ended` lists once it
    had to make room."""

    def __init__(self, total_bytes: int, key_bytes: int) -> None:
        self.now_s = 100.0
        self.budget = BodyBudget(total_bytes, key_bytes, lambda: self.now_s)
        self.stack = ExitStack()
        self.ended: list[HeldBody] = []

    def account(self, tenant: bytes = b"a") -> HeldBody:
        return self.stack.enter_context(self.budget.account(tenant))

    def upload(self, tenant: bytes = b"a") -> HeldBody:
        body = self.account(tenant)
        self.stack.enter_context(body.upload(lambda error: self.ended.append(body)))
        return body


def test_one_key_holds_no_more_than_its_share() -> None:
    scene = Scene(1000, 100)
    scene.upload().hold(100)
    with pytest.raises(RateLimited, match=r"API key.*100 bytes.*its share"):
        scene.upload().hold(1)
    scene.upload(b"b").hold(100)
    assert scene.budget.held_bytes == 200
    scene.stack.close()
    assert scene.budget.held_bytes == 0


def test_all_keys_hold_no_more_than_the_budget() -> None:
    scene = Scene(150, 100)
    scene.upload().hold(100)
    second = scene.upload(b"b")
    second.hold(50)
    with pytest.raises(RateLimited, match=r"the router receives hold"):
        second.hold(51)
    assert scene.budget.held_bytes == 150 and not scene.ended


def test_a_body_counts_until_its_account_ends() -> None:
    scene = Scene(100, 100)
    with scene.budget.account(b"a") as body:
        with body.upload(lambda error: pytest.fail("it has come")):
            body.hold(80)
        scene.now_s += 10 * SILENT_S
        with pytest.raises(RateLimited):
            scene.upload().hold(21)
    scene.upload().hold(100)


def test_silent_upload_makes_room_for_one_that_goes_on() -> None:
    scene = Scene(1000, 100)
    first, second, other = scene.upload(), scene.upload(), scene.upload(b"b")
    other.hold(10)
    first.hold(40)
    scene.now_s += SILENT_S / 2
    second.hold(40)
    late = scene.upload()
    with pytest.raises(RateLimited):
        late.hold(50)
    scene.now_s += SILENT_S / 2
    late.hold(50)
    assert scene.ended == [first] and scene.budget.held_bytes == 10 + 40 + 50
    with pytest.raises(RateLimited):
        first.hold(41)  # what came in the meantime


def test_small_parts_do_not_keep_an_upload_from_being_silent() -> None:
    scene = Scene(4 * PROGRESS_BYTES, 4 * PROGRESS_BYTES)
    slow, fast = scene.upload(), scene.upload()
    slow.hold(1)
    fast.hold(1)
    scene.now_s += SILENT_S
    slow.hold(PROGRESS_BYTES)  # a byte too few
    fast.hold(PROGRESS_BYTES + 1)
    fast.hold(4 * PROGRESS_BYTES)
    assert scene.ended == [slow]


def test_share_of_a_key_is_forgotten_with_its_last_body() -> None:
    scene = Scene(100, 100)
    for number in range(100):
        with scene.budget.account(b"%d" % number) as body:
            body.hold(1)
    assert tenants_of(scene.budget) == []


def test_the_budget_has_room_for_the_largest_body() -> None:
    largest = declared_settings()["router.max_body_bytes"].high
    assert largest is not None and largest <= RouterConfig().bodies_bytes


@pytest.mark.parametrize(("max_body_bytes", "key_bytes"), [(10, 25), (60, 60)])
def test_share_of_a_key_is_a_quarter_or_one_body(max_body_bytes: int, key_bytes: int) -> None:
    config = RouterConfig(api_keys=KEYS, bodies_bytes=100, max_body_bytes=max_body_bytes)
    with body_budget.body_budget(config, lambda: 0.0).account(b"a") as body:
        body.hold(key_bytes)
        with pytest.raises(RateLimited, match=f"{key_bytes} bytes already .its share"):
            body.hold(key_bytes + 1)


def small(config: RouterConfig, **fields: Any) -> RouterConfig:
    return replace(
        config,
        api_keys=KEYS,
        max_body_bytes=4 * CHUNK,
        bodies_bytes=1 << 20,
        key_bodies_share=8 * CHUNK / (1 << 20),
        **fields,
    )


async def stalled(url: str, key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request that lacks a byte of its body."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n"
        b"content-length: %d\r\n\r\n" % (key.encode(), 4 * CHUNK) + b" " * (4 * CHUNK - 1)
    )
    await writer.drain()
    return reader, writer


@pytest.mark.timed
async def test_stalled_bodies_of_one_key_stop_at_its_share(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "SILENT_S", 1000.0)
    async with router(config=small(FAST_ROUTER)) as running:
        clients = [await stalled(running.url, KEYS[0]) for _ in range(3)]
        reads = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in clients]
        done, waiting = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        head = done.pop().result()
        assert head.startswith(b"HTTP/1.1 429 ") and b"retry-after" in head.lower()
        assert len(waiting) == 2
        running.http.headers["authorization"] = f"Bearer {KEYS[1]}"
        assert (await running.complete(max_tokens=1)).status_code == 200
        for _, writer in clients:
            writer.close()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.timed
async def test_stalled_messages_of_one_key_stop_at_its_share(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "SILENT_S", 1000.0)
    monkeypatch.setattr(grpc_call, "UNKNOWN_PROGRESS_S", 0.1)
    config = small(FAST_ROUTER, grpc_port=0)
    async with (
        router(config=config) as running,
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        key = (("authorization", f"Bearer {KEYS[0]}"),)
        method = channel.stream_stream("/baton.client.v1.Inference/Generate")
        calls = [method(metadata=key) for _ in range(3)]
        reads = [asyncio.create_task(call.read()) for call in calls]
        done, waiting = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError, match="API key") as refused:
            done.pop().result()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(waiting) == 2
        for call in calls:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
