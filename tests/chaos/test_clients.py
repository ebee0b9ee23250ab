"""Clients against scripted routers: what each way to answer counts as, and which request is sent
again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from chaos.answers import Answer, Choice
from chaos.asks import Ask, Kind
from chaos.clients import Clients, Outcome, capacity, offer
from tests.support.json_values import JsonObject
from tests.support.waiting import eventually

ASK = Ask(0, "a river", 4)
USAGE = (3, 4)


def spoken(tokens: str, finish: str = "length") -> Choice:
    """A token is a letter, with a logprob of its own."""
    return Choice(list(tokens), [-ord(token) / 8 for token in tokens], tokens, finish)


RIGHT = {
    0: Answer({0: spoken("abcd")}, USAGE),
    1: Answer({0: spoken("ab"), 1: spoken("xy")}, USAGE),
}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def body(*tokens: str, index: int = 0, finish: str | None = None) -> JsonObject:
    reported = spoken("".join(tokens))
    logprobs = {"tokens": reported.tokens, "token_logprobs": reported.logprobs} if tokens else None
    return {"index": index, "text": reported.text, "logprobs": logprobs, "finish_reason": finish}


def event(*tokens: str, index: int = 0, finish: str | None = None) -> bytes:
    return sent({"choices": [body(*tokens, index=index, finish=finish)], "usage": None})


def sent(value: JsonObject) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def counted(usage: tuple[int, int]) -> JsonObject:
    return {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}


class Scripted:
    """A router that writes `parts` to each client that asks for a completion, a little apart, and
    closes; None in them: never more, until the test is over."""

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
            await asyncio.sleep(0.005)  # so that the client gets each part by itself


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


DONE = b"data: [DONE]\n\n"
LAST = event("d", finish="length")
GOOD = (HEAD, event("a"), event("b", "c"), LAST, DONE)
ERROR = b'data: {"error": {"message": "no worker"}}\n\n'
REFUSAL = b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 4\r\n\r\nbusy"


@pytest.mark.parametrize(
    ("parts", "outcome", "tokens"),
    [
        (GOOD, Outcome.RIGHT, 4),
        ((HEAD, event("a"), event("x"), event("c"), LAST, DONE), Outcome.WRONG, 4),
        ((HEAD, event("a"), DONE), Outcome.WRONG, 1),
        ((HEAD, event("a", "b", "c", "d", "e", finish="length"), DONE), Outcome.WRONG, 5),
        ((HEAD, event("a", "b", "c"), event("d", finish="stop"), DONE), Outcome.WRONG, 4),
        ((HEAD, event("a", "b", "c"), event("d"), DONE), Outcome.WRONG, 4),
        ((HEAD, event("a", "b", "c"), LAST, event(finish="length"), DONE), Outcome.WRONG, 4),
        ((HEAD, event("a", finish="stop")), Outcome.WRONG, 1),
        ((HEAD, event("a", finish="length")), Outcome.WRONG, 1),  # before its end
        ((HEAD, event("a"), ERROR), Outcome.FAILED, 1),
        ((HEAD, event("a"), event(finish="error"), ERROR, DONE), Outcome.FAILED, 1),
        ((HEAD, event("a"), event(finish="error"), DONE), Outcome.WRONG, 1),
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
    token_s = [time for choice in trace.answer.choices.values() for time in choice.token_s]
    assert len(token_s) == tokens and token_s == sorted(token_s)
    assert bool(trace.detail) is (outcome is not Outcome.RIGHT)
    assert b"x-request-deadline: 5.000" in router.heads[0].lower()
    assert b"authorization: bearer k" in router.heads[0].lower()


def stream(*choices: JsonObject, usage: tuple[int, int] | None = None) -> tuple[bytes, ...]:
    events = [sent({"choices": [choice]}) for choice in choices]
    counts = [sent({"choices": []} | counted(usage))] if usage else []
    return (HEAD, *events, *counts, DONE)


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b"


def whole(*choices: JsonObject, usage: tuple[int, int] | None = USAGE) -> tuple[bytes, ...]:
    content = json.dumps({"choices": choices} | (counted(usage) if usage else {})).encode()
    return (WHOLE % (len(content), content),)


ENDED = body(*"abcd", finish="length")
FIRST, SECOND = body(*"ab", finish="length"), body(*"xy", index=1, finish="length")
QUIETER = ENDED | {"logprobs": {"tokens": list("abcd"), "token_logprobs": [-1.0] * 4}}
BOTH = Ask(1, "a river", 2, Kind.CHOICES)


def of(kind: Kind) -> Ask:
    return Ask(0, "a river", 4, kind)


@pytest.mark.parametrize(
    ("ask", "parts", "said"),
    [
        (of(Kind.SEEDED), stream(ENDED), ""),
        (of(Kind.SEEDED), stream(body(*"abce", finish="length")), "choice 0"),
        (of(Kind.SEEDED), stream(QUIETER), "choice 0"),
        (of(Kind.STOP), stream(ENDED | {"text": "abc"}), "choice 0"),
        (of(Kind.STOP), stream(ENDED, usage=USAGE), "usage (3, 4) instead of None"),
        (BOTH, stream(SECOND, FIRST), ""),
        (BOTH, stream(body("a"), body("x", index=1), body("b", finish="length"),
                      body("y", index=1, finish="length")), ""),
        (BOTH, stream(FIRST, body(*"xz", index=1, finish="length")), "choice 1"),
        (BOTH, stream(FIRST, body(*"xy", index=1, finish="stop")), "choice 1"),
        (BOTH, stream(FIRST | {"index": 1}, SECOND | {"index": 0}), "choice"),
        (BOTH, stream(FIRST), "choices [0] instead of [0, 1]"),
        (BOTH, stream(FIRST, SECOND, SECOND | {"index": 2}), "choices [0, 1, 2]"),
        (of(Kind.USAGE), stream(ENDED, usage=USAGE), ""),
        (of(Kind.USAGE), stream(ENDED, usage=(3, 5)), "usage (3, 5)"),
        (of(Kind.USAGE), stream(ENDED, usage=(4, 4)), "usage (4, 4)"),
        (of(Kind.USAGE), stream(ENDED), "usage None"),
        (of(Kind.WHOLE), whole(ENDED), ""),
        (of(Kind.WHOLE), whole(body(*"abce", finish="length")), "choice 0"),
        (of(Kind.WHOLE), whole(body(*"abcd", finish="stop")), "choice 0"),
        (of(Kind.WHOLE), whole(ENDED, usage=(3, 5)), "usage (3, 5)"),
        (of(Kind.WHOLE), whole(ENDED, usage=None), "usage None"),
        (of(Kind.UNSEEDED), stream(body(*"wxyz", finish="length")), ""),
        (of(Kind.UNSEEDED), stream(body(*"wxy", finish="length")), "choice 0"),
        (of(Kind.UNSEEDED), stream(body(*"vwxyz", finish="length")), "choice 0"),
        (of(Kind.UNSEEDED), stream(body(*"wxyz", finish="stop")), "choice 0"),
    ],
)  # fmt: skip
async def test_of_each_kind_all_is_compared(ask: Ask, parts: tuple[bytes, ...], said: str) -> None:
    async with clients_of(Scripted(*parts)) as clients:
        trace = await clients.ask(ask)
    assert trace.outcome is (Outcome.WRONG if said else Outcome.RIGHT)
    assert (
        trace.kind is ask.kind
        and trace.detail.startswith(said)
        and bool(trace.detail) is bool(said)
    )


@pytest.mark.parametrize(
    ("ask", "parts", "outcome"),
    [
        (BOTH, (HEAD, event("x", index=1)), Outcome.CUT),
        (BOTH, (HEAD, event("a"), event("y", index=1)), Outcome.WRONG),
        (BOTH, (HEAD, event("a"), event("x", index=2)), Outcome.WRONG),
        (of(Kind.UNSEEDED), (HEAD, event("x")), Outcome.CUT),
        (of(Kind.UNSEEDED), (HEAD, event(*"vwxyz")), Outcome.WRONG),
        (of(Kind.UNSEEDED), (HEAD, event("x", finish="length")), Outcome.WRONG),
        (of(Kind.UNSEEDED), (HEAD, event(*"wxyz", finish="length")), Outcome.CUT),
        (of(Kind.WHOLE), (REFUSAL,), Outcome.REFUSED),
        (of(Kind.WHOLE), (whole(ENDED)[0][:-1],), Outcome.FAILED),  # asked elsewhere, if possible
    ],
)
async def test_of_each_kind_what_came_before_a_break_is_compared(
    ask: Ask, parts: tuple[bytes, ...], outcome: Outcome
) -> None:
    async with clients_of(Scripted(*parts)) as clients:
        assert (await clients.ask(ask)).outcome is outcome


async def test_a_whole_answer_that_breaks_off_is_asked_for_elsewhere() -> None:
    good = whole(ENDED)
    async with clients_of(Scripted(good[0][:-1]), Scripted(*good)) as clients:
        traces = [await clients.ask(of(Kind.WHOLE)) for _ in range(2)]
    assert {trace.outcome for trace in traces} == {Outcome.RIGHT}
    assert sorted(trace.tries for trace in traces) == [1, 2]
    assert not any(trace.answer.choices[0].token_s for trace in traces)


@pytest.mark.parametrize("parts", [(), (HEAD,), (b"HTTP/1.1 20",)])
async def test_a_client_changes_router_when_one_fails_before_a_token(
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
        await eventually(lambda: clients.ready == {"router-1"})
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
        await eventually(lambda: clients.traces[-1] is not trace and clients.traces[-1].tokens)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert clients.traces[-1].outcome is Outcome.LEFT


async def test_asks_are_offered_at_an_even_pace_however_they_fare() -> None:
    async with clients_of(Scripted(HEAD, None), deadline_s=0.2) as clients:
        over = asyncio.Event()
        offering = asyncio.create_task(offer(clients, [ASK], 50.0, over))
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.5)  # the pace is measured over this time
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
