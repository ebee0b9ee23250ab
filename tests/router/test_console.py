"""The console's data on the admin port: its key, its stream, pages that read slowly or leave."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import cast

import httpx
import pytest

from baton.router.console import console_feed
from baton.router.console.admin_port import AdminAccess
from baton.router.console.advice_board import MAX_BYTES
from baton.router.console.console_feed import MAILBOX, MAX_VIEWERS, ConsoleFeed
from baton.router.console.console_state import ConsoleState
from baton.router.console.metric_values import by_label
from baton.runtime import metrics, process_memory
from baton.runtime.errors import ConfigError, Overloaded
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.waiting import eventually

KEY = "the-operators-key-0123456789"
ADMIN = AdminAccess(KEY)
API_KEY = "first-key-0123456789abcdef"
PAGE = ("/", "/index.html")
SECRET = "a sentence of a client that no console shows"


def admin_of(running: RunningRouter) -> httpx.AsyncClient:
    assert running.admin is not None
    return running.admin


@asynccontextmanager
async def stream_of(running: RunningRouter) -> AsyncIterator[AsyncIterator[JsonObject]]:
    """The messages of a page's stream."""
    async with admin_of(running).stream("GET", "/console/stream") as reply:
        assert reply.status_code == 200, await reply.aread()
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield _messages(reply)


async def _messages(reply: httpx.Response) -> AsyncIterator[JsonObject]:
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def test_only_the_operators_key_opens_the_port(router: StartRouter) -> None:
    config = replace(FAST_ROUTER, api_keys=(API_KEY,))
    async with router(admin=ADMIN, config=config) as running:
        admin = admin_of(running)
        for path in ("/console/stream", "/traces", "/v1/models"):
            for headers in ({"authorization": ""}, {"authorization": f"Bearer {API_KEY}"}):
                assert (await admin.get(path, headers=headers)).status_code == 401
            in_url = await admin.get(path, params={"key": KEY}, headers={"authorization": ""})
            assert in_url.status_code == 401
        assert (await admin.get("/v1/models")).status_code == 200
        own = await running.http.get("/traces", headers={"authorization": f"Bearer {KEY}"})
        assert own.status_code == 401


async def test_the_page_needs_no_key_and_runs_nothing_else(router: StartRouter) -> None:
    async with router(admin=ADMIN) as running:
        for path in PAGE:
            reply = await admin_of(running).get(path, headers={"authorization": ""})
            assert reply.status_code == 200 and "text/html" in reply.headers["content-type"]
            policy = reply.headers["content-security-policy"]
            assert (
                "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            )
        assert (await running.http.get("/")).status_code == 404  # clients have no console
        assert (await running.http.get("/console/stream")).status_code == 404


@pytest.mark.parametrize("path", ["/metrics", "/readyz", "/version"])
async def test_a_page_of_another_host_reads_nothing_without_the_key(
    router: StartRouter, path: str
) -> None:
    """A browser of this host whose DNS was made to answer 127.0.0.1 for that page's name."""
    no_key = {"authorization": ""}
    async with router(admin=ADMIN) as running:
        admin = admin_of(running)
        assert (await admin.get(path, headers=no_key)).status_code == 200
        for header in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
            reply = await admin.get(path, headers=no_key | header)
            assert reply.status_code == 403
            assert "localhost or an address alone" in reply.json()["error"]["message"]
        local = await admin.get(path, headers=no_key | {"host": "localhost:9402"})
        assert local.status_code == 200


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.5", False), ("a.b", False)],
)
def test_only_a_port_of_this_host_checks_the_host(host: str, local: bool) -> None:
    """Elsewhere probes and Prometheus may use its name."""
    assert AdminAccess(KEY, host).on_loopback is local


ADVICE: JsonObject = {
    "time": 5.0,
    "requests": 40,
    "window_s": 60.0,
    "error": 0.07,
    "findings": [{"level": "bad", "text": "TTFT is 2 s: 80% the wait for a worker's step."}],
    "ratios": [
        {"step": step, "name": name, "obstacle": why, "good_share": share, "goodput_per_s": rate}
        for step, name, why, share, rate in (
            (-1, "", "the only prefill worker stays", None, None),
            (0, "1 prefill, 3 decode", "", 0.6, 12.0),
            (1, "2 prefill, 2 decode", "", 0.9, 18.0),
        )
    ],
    "alternatives": [
        {
            "kind": "order",
            "change": "2 prefill, 2 decode",
            "how": "`baton role WORKER prefill` for one worker",
            **dict.fromkeys(("ttft_s", "ttft_p99_s", "gap_s", "gap_p99_s", "end_s"), 0.5),
            "good_share": 0.9,
            "low": 0.8,
            "high": None,
        }
    ],
}


async def test_posted_advice_is_in_the_state(router: StartRouter) -> None:
    async with router(admin=ADMIN) as running:
        admin = admin_of(running)
        assert (await running.http.post("/console/advice", json=ADVICE)).status_code == 404
        no_key = {"authorization": ""}
        reply = await admin.post("/console/advice", json=ADVICE, headers=no_key)
        assert reply.status_code == 401
        posted = ADVICE | {"unknown": "is left out"}
        assert (await admin.post("/console/advice", json=posted)).status_code == 204
        async with stream_of(running) as messages:
            assert (await anext(messages))["state"]["advice"] == ADVICE
            changed = [*ADVICE["alternatives"], *ADVICE["alternatives"]]
            await admin.post("/console/advice", json=ADVICE | {"alternatives": changed})
            async for message in messages:
                if "advice" in message["state"]:
                    break
            assert message["state"]["advice"]["alternatives"] == changed
        large = b"x" * (MAX_BYTES + 1)
        assert (await admin.post("/console/advice", content=large)).status_code == 413


async def test_a_page_gets_the_whole_state_then_changes(router: StartRouter) -> None:
    pool = {"total": 10, "free": 3, "cached": 4, "used": 1, "leased": 1, "pinned": 1}
    async with router(admin=ADMIN, workers=("prefill-0", "decode-0"), pool=pool) as running:
        await running.chat(max_tokens=3)
        async with stream_of(running) as messages:
            whole = await anext(messages)
            after = await anext(messages)
    assert whole["whole"] and whole["model"] == "tiny" and "whole" not in after
    assert whole["workers"]["prefill-0"]["role"] == "prefill"
    row = whole["workers"]["decode-0"]
    assert row["state"] == "ready" and row["blocks"] == {**pool, "quarantined": 0}
    assert len(after["points"]) == 1 and len(after["points"][0]) == len(whole["fields"])
    assert sum(whole["state"]["placements"].values()) >= 1


async def test_ended_requests_come_without_their_text(router: StartRouter) -> None:
    config = replace(FAST_ROUTER, api_keys=(API_KEY,))
    async with router(admin=ADMIN, config=config, step_s=0.01) as running:
        async with stream_of(running) as messages:
            await anext(messages)
            asked = [{"role": "user", "content": SECRET}]
            body = {"model": "tiny", "messages": asked, "max_tokens": 4}
            headers = {"authorization": f"Bearer {API_KEY}"}
            reply = await running.http.post("/v1/chat/completions", json=body, headers=headers)
            seen = []
            async with asyncio.timeout(10):
                async for message in messages:
                    seen.append(json.dumps(message))
                    if message["traces"]:
                        break
        found = await admin_of(running).get(f"/trace/{reply.headers['x-request-id']}")
        seen.append(found.text)
    assert message["traces"][0]["id"] == reply.headers["x-request-id"] == found.json()["id"]
    assert message["traces"][0]["output_tokens"] == 4
    assert not any(SECRET in each or SECRET.split()[1] in each for each in seen)


async def test_a_killed_worker_shows_within_three_seconds(router: StartRouter) -> None:
    workers = ("decode-0", "decode-1")
    async with router(admin=ADMIN, workers=workers) as running, stream_of(running) as messages:
        assert (await anext(messages))["workers"]["decode-1"]["state"] == "ready"
        await anext(messages)
        await running.workers["decode-1"].die()
        async with asyncio.timeout(3 * slowness()):
            async for message in messages:
                events = [each for each in message["events"] if each["level"] == "bad"]
                if events:
                    break
    assert events[0]["worker"] == "decode-1" and events[0]["text"] == "lost its link"
    assert message["workers"]["decode-1"]["state"] == "lost"


@pytest.mark.parametrize("tokens", [0, 1])  # the first one comes before the last blocks
async def test_handoffs_in_flight_are_shown(router: StartRouter, tokens: int) -> None:
    config = replace(FAST_ROUTER, placement="disaggregated")
    names = ("prefill-0", "decode-0")
    async with router(admin=ADMIN, workers=names, config=config, pause_at=tokens) as running:
        asking = asyncio.create_task(running.complete(max_tokens=3, prompt="the quick " * 40))
        await eventually(lambda: running.workers["decode-0"].seen("submit"))
        async with stream_of(running) as messages:
            whole = await anext(messages)
            (handoff,) = whole["state"]["active"]["handoffs"]
            while handoff["output"] < tokens:
                found = (await anext(messages))["state"].get("active", {"handoffs": [handoff]})
                (handoff,) = found["handoffs"]
            running.workers["decode-0"].pause_at = None
            await asking
            async with asyncio.timeout(5):
                async for message in messages:
                    if message["state"].get("active", {}).get("requests") == []:
                        break
    assert (handoff["prefill"], handoff["decode"]) == ("prefill-0", "decode-0")
    assert handoff["phase"] == "handoff" and handoff["answered"] is bool(tokens)
    assert whole["state"]["prefixes"][0]["prompts"] == 1


async def test_the_playground_and_explanations_work(router: StartRouter) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    streamed = {**asked, "stream": True, "logprobs": True, "top_logprobs": 3}
    async with router(admin=ADMIN) as running:
        admin = admin_of(running)
        reply = await admin.post("/v1/chat/completions", json=streamed)
        explained = await admin.post("/v1/chat/completions/explain", json=asked)
    assert reply.text.endswith("data: [DONE]\n\n") and '"logprobs"' in reply.text
    assert explained.json()["prompts"][0]["decode_worker"] == "decode-0"


async def test_consoles_are_bounded_and_leave_nothing(router: StartRouter) -> None:
    async with router(admin=ADMIN) as running:
        port = admin_of(running).base_url.port
        pages = [_page(int(port or 0)) for _ in range(MAX_VIEWERS)]
        try:
            await eventually(lambda: all(map(_has_begun, pages)))
            assert (await admin_of(running).get("/console/stream")).status_code == 503
            pages.pop().close()
            await eventually(lambda: _has_room(running))
        finally:
            for page in pages:
                page.close()


async def _has_room(running: RunningRouter) -> bool:
    async with admin_of(running).stream("GET", "/console/stream") as reply:
        return reply.status_code != 503


def _page(port: int) -> socket.socket:
    """A connection that asks for the stream, and reads only when asked to."""
    page = socket.create_connection(("127.0.0.1", port))
    page.sendall(
        b"GET /console/stream HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer "
        + KEY.encode()
        + b"\r\n\r\n"
    )
    page.setblocking(False)
    return page


def _has_begun(page: socket.socket) -> bool:
    try:
        return b"200 OK" in page.recv(64, socket.MSG_PEEK)
    except BlockingIOError:
        return False


class LargeState:
    """A state of 1 MiB, of which each change is as large."""

    def __init__(self) -> None:
        self.changes = 0

    def observe(self) -> None:
        pass

    def restart(self) -> None:
        pass

    def change(self) -> bytes:
        self.changes += 1
        return b"%07d" % self.changes + bytes(1 << 20)

    def whole(self) -> bytes:
        return b"whole after %d" % self.changes


async def test_a_page_that_does_not_read_holds_few_messages() -> None:
    state = LargeState()
    feed = ConsoleFeed(cast(ConsoleState, state))
    with feed.open() as slow, feed.open() as quick:
        assert await slow.next() == await quick.next() == b"whole after 0"
        for number in range(1, 100):
            feed.tick()
            assert (await quick.next() or b"").startswith(b"%07d" % number)
            assert len(slow) <= MAILBOX
        assert await slow.next() == b"whole after 99"
        feed.tick()
        assert await slow.next() == await quick.next()  # one message for both
    assert len(feed) == 0
    feed.tick()
    assert state.changes == 100  # none is computed for no page


async def test_the_cost_of_the_state_is_counted(router: StartRouter) -> None:
    async with router(admin=ADMIN) as running, stream_of(running) as messages:
        await anext(messages)
        before = by_label(metrics.CONSOLE_SECONDS)[""]
        await anext(messages)
        await anext(messages)
        assert 0 < by_label(metrics.CONSOLE_SECONDS)[""] - before < 1


async def test_a_page_that_never_reads_slows_nothing(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over real sockets: with 200 messages of 256 KiB, 50 MiB would wait for it."""

    def change(_: ConsoleState) -> bytes:
        return b"data: {}" + b" " * (256 << 10) + b"\n\n"

    monkeypatch.setattr(console_feed, "TICK_S", 0.01)
    monkeypatch.setattr(ConsoleState, "change", change)
    async with router(admin=ADMIN) as running, stream_of(running) as messages:
        page = _page(int(admin_of(running).base_url.port or 0))
        try:
            await eventually(lambda: _has_begun(page))
            before = process_memory.allocated_bytes()
            for _ in range(200):
                await anext(messages)  # a page beside it gets each message
            begun_s = time.monotonic()
            assert (await running.chat(max_tokens=3)).status_code == 200
            assert time.monotonic() - begun_s < 5 * slowness()
            grown = process_memory.allocated_bytes() - before
        finally:
            page.close()
    assert grown < 16 << 20


async def test_a_closed_feed_ends_its_pages() -> None:
    state = LargeState()
    feed = ConsoleFeed(cast(ConsoleState, state))
    with feed.open() as viewer:
        await viewer.next()
        waiting = asyncio.create_task(viewer.next())
        await asyncio.sleep(0)
        feed.close()
        assert await waiting is None


async def test_a_stopping_router_ends_the_streams(router: StartRouter) -> None:
    async with router(admin=ADMIN) as running, stream_of(running) as messages:
        await anext(messages)
        running.serving.cancel()
        async with asyncio.timeout(10 * slowness()):
            async for _ in messages:
                pass
        await asyncio.gather(running.serving, return_exceptions=True)


async def test_too_many_pages_are_refused() -> None:
    state = LargeState()
    feed = ConsoleFeed(cast(ConsoleState, state))
    with ExitStack() as open_pages:
        for _ in range(MAX_VIEWERS):
            open_pages.enter_context(feed.open())
        with pytest.raises(Overloaded, match=str(MAX_VIEWERS)), feed.open():
            pass


@pytest.mark.parametrize("key", ["", "short", "ünicode-0123456789", "a line\nbreak-0123456789"])
def test_a_key_that_is_easily_guessed_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="BATON_ADMIN_KEY"):
        AdminAccess(key)


async def test_an_admin_port_in_use_is_named(router: StartRouter) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} .*--admin-port"):
            async with router(admin=replace(ADMIN, port=port)):
                pass
