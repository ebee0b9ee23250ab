"""Clients against scripted routers: what each way to answer counts as, and who is asked again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from chaos.asks import Ask
from chaos.clients import Clients, Outcome, capacity, offer

ASK = Ask(0, "a river", 4)
RIGHT = {0: ["a", "b", "c", "d"]}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(*tokens: str) -> bytes:
    choice = {"index": 0, "text": "".join(tokens), "logprobs": {"tokens": list(tokens)}}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class Scripted:
    """A router that writes `parts` to whoever asks for a completion, a little apart, and closes;
    None in them: never more, until the test is over."""

    def __init__(self, *parts: bytes | None, ready: bool = True) -> None:
        self.parts, self.ready = parts, ready
        self.heads: list[bytes] = []
        self.over = asyncio.Event()
        self.serving: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.serve(reader, writer))
        self.serving.add(task)

    async def close(self) -> None:
        self.over.set()
        await asyncio.gather(*self.serving)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.answer(await reader.readuntil(b"\r\n\r\n"), writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left: some tests are about that
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET /readyz"):
            status = b"200 OK" if self.ready else b"503 Service Unavailable"
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
            return
        self.heads.append(head)
        for part in self.parts:
            if part is None:
                await self.over.wait()
                return
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def clients_of(*routers: Scripted, deadline_s: float = 5.0) -> AsyncIterator[Clients]:
    servers = [await asyncio.start_server(router.accept, "127.0.0.1", 0) for router in routers]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    urls = {f"router-{n}": f"http://127.0.0.1:{port}" for n, port in enumerate(ports)}
    try:
        async with Clients(urls, RIGHT, deadline_s=deadline_s, api_key="k") as made:
            yield made
    finally:
        for server, router in zip(servers, routers, strict=True):
            server.close()
            await router.close()


GOOD = (HEAD, event("a"), event("b", "c"), event("d"), b"data: [DONE]\n\n")
ERROR = b'data: {"error": {"message": "no worker"}}\n\n'
REFUSAL = b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 4\r\n\r\nbusy"


@pytest.mark.parametrize(
    ("parts", "outcome", "tokens"),
    [
        (GOOD, Outcome.RIGHT, 4),
        ((HEAD, event("a"), event("x"), event("c"), event("d"), b"data: [DONE]\n\n"),
         Outcome.WRONG, 4),
        ((HEAD, event("a"), b"data: [DONE]\n\n"), Outcome.WRONG, 1),
        ((HEAD, event("a", "b", "c", "d", "e"), b"data: [DONE]\n\n"), Outcome.WRONG, 5),
        ((HEAD, event("a"), ERROR), Outcome.FAILED, 1),
        ((HEAD, event("x"), ERROR), Outcome.WRONG, 1),
        ((HEAD, event("a")), Outcome.CUT, 1),
        ((HEAD, event("b")), Outcome.WRONG, 1),
        ((REFUSAL,), Outcome.REFUSED, 0),
        ((b"HTTP/1.1 503 Gone\r\nContent-Length: 2\r\n\r\nno",), Outcome.FAILED, 0),
        ((b"HTTP/1.1 504 Late\r\nContent-Length: 2\r\n\r\nno",), Outcome.FAILED, 0),
    ],
)  # fmt: skip
async def test_what_an_answer_counts_as(
    parts: tuple[bytes, ...], outcome: Outcome, tokens: int
) -> None:
    router = Scripted(*parts)
    async with clients_of(router) as clients:
        trace = await clients.ask(ASK)
    assert (trace.outcome, len(trace.tokens), trace.tries) == (outcome, tokens, 1)
    assert len(trace.token_s) == tokens and trace.token_s == sorted(trace.token_s)
    assert bool(trace.detail) is (outcome is not Outcome.RIGHT)
    assert b"x-request-deadline: 5.000" in router.heads[0].lower()
    assert b"authorization: bearer k" in router.heads[0].lower()


@pytest.mark.parametrize("parts", [(), (HEAD,), (b"HTTP/1.1 20",)])
async def test_a_router_that_breaks_off_before_a_token_is_left_for_another(
    parts: tuple[bytes, ...],
) -> None:
    broken, good = Scripted(*parts), Scripted(*GOOD)
    async with clients_of(broken, good) as clients:
        traces = [await clients.ask(ASK) for _ in range(2)]
    assert {trace.outcome for trace in traces} == {Outcome.RIGHT}
    assert sorted(trace.tries for trace in traces) == [1, 2]


async def test_where_every_router_breaks_off_the_request_has_failed() -> None:
    async with clients_of(Scripted(), Scripted()) as clients:
        trace = await clients.ask(ASK)
    assert (trace.outcome, trace.tries) == (Outcome.FAILED, 2)


async def test_an_error_is_not_asked_again_elsewhere() -> None:
    async with clients_of(Scripted(HEAD, ERROR), Scripted(HEAD, ERROR)) as clients:
        assert [(await clients.ask(ASK)).tries for _ in range(2)] == [1, 1]


async def test_a_router_that_says_it_is_not_ready_gets_nothing() -> None:
    leaving, good = Scripted(*GOOD, ready=False), Scripted(*GOOD)
    async with clients_of(leaving, good) as clients:
        await until(lambda: clients.ready == {"router-1"})
        traces = [await clients.ask(ASK) for _ in range(4)]
    assert {trace.router for trace in traces} == {"router-1"} and not leaving.heads


async def test_no_end_long_after_the_deadline_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos.clients.HUNG_S", 0.05)
    async with clients_of(Scripted(HEAD, event("a"), None), deadline_s=0.1) as clients:
        trace = await clients.ask(ASK)
    assert trace.outcome is Outcome.HUNG
    assert 0.15 <= trace.ended_s - trace.started_s < 1.0


async def test_a_client_may_go_away_at_a_token_or_at_any_time() -> None:
    async with clients_of(Scripted(*GOOD[:-1], None)) as clients:
        trace = await clients.ask(ASK, leave=lambda trace: len(trace.tokens) >= 2)
        assert (trace.outcome, len(trace.tokens)) == (Outcome.LEFT, 3)
        asking = asyncio.create_task(clients.ask(ASK))
        await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert clients.traces[-1].outcome is Outcome.LEFT


async def test_asks_are_offered_at_an_even_pace_however_they_fare() -> None:
    async with clients_of(Scripted(HEAD, None), deadline_s=0.2) as clients:
        over = asyncio.Event()
        offering = asyncio.create_task(offer(clients, [ASK], 50.0, over))
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.5)
        over.set()
        took_s = asyncio.get_running_loop().time() - began_s
        tasks = await offering
        starts = [trace.started_s for trace in clients.traces]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert 0.6 * 50 * took_s <= len(tasks) <= 50 * took_s + 2
    assert starts == sorted(starts) and len(starts) >= len(tasks) - 1


async def test_capacity_is_what_ends_well_a_second() -> None:
    async with clients_of(Scripted(*GOOD)) as clients:
        found = await capacity(clients, [ASK], clients_at_once=2, for_s=0.6)
        right = sum(trace.outcome is Outcome.RIGHT for trace in clients.traces)
    assert 0 < found <= right / 0.4
    assert found >= right / 0.6 / 2


async def until(happens: Callable[[], Any], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not happens():
            await asyncio.sleep(0.01)
