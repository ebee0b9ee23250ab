"""gRPC clients against scripted routers: what each way to end counts as, and what is sent again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from baton.proto import client_pb2, client_pb2_grpc
from chaos import clients as module
from chaos.answers import Answer, Choice
from chaos.asks import Ask, Kind
from chaos.clients import Clients, Outcome

CODE = grpc.StatusCode
ASK = Ask(0, "a river", 4)
TOKENS = ["a", "ü", "\ufffd", "d"]
RIGHT = {0: Answer({0: Choice(TOKENS, [-0.5] * 4, "", "length")}, (3, 4))}
SAID = (("x-request-id", "req-1"),)
NOWHERE = "http://127.0.0.1:9"  # no server answers by HTTP

Abort = tuple[grpc.StatusCode, tuple[tuple[str, str], ...]]


class Scripted(client_pb2_grpc.InferenceServicer):
    """A router that sends `parts` to each client: the bytes of tokens, or how it breaks off. Then
    an end by length and the `usage`, if there is one."""

    def __init__(
        self, *parts: list[bytes] | Abort, choice: int = 0, usage: tuple[int, int] | None = (3, 4)
    ) -> None:
        self.parts, self.choice, self.usage = parts, choice, usage
        self.requests: list[client_pb2.GenerateRequest] = []
        self.keys: list[str] = []
        self.left_s: list[float] = []

    async def Generate(
        self, request: client_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[client_pb2.GenerateResponse]:
        self.requests.append(request)
        self.keys.append(str(dict(context.invocation_metadata() or ())["authorization"]))
        self.left_s.append(context.time_remaining())
        for part in self.parts:
            if isinstance(part, tuple):
                code, trailers = part
                await context.abort(code, "as scripted", trailers)
            entries = [client_pb2.TokenLogprob(bytes=token, logprob=-0.5) for token in part]
            yield self.said(logprobs=entries)
        yield self.said(finish_reason=client_pb2.LENGTH)
        if self.usage:
            prompt, completion = self.usage
            usage = client_pb2.Usage(prompt_tokens=prompt, completion_tokens=completion)
            yield client_pb2.GenerateResponse(usage=usage)

    def said(self, **fields: Any) -> client_pb2.GenerateResponse:
        return client_pb2.GenerateResponse(pieces=[client_pb2.Piece(choice=self.choice, **fields)])


@contextlib.asynccontextmanager
async def clients_of(*routers: Scripted, deadline_s: float = 5.0) -> AsyncIterator[Clients]:
    addresses = {}
    servers = []
    for number, router in enumerate(routers):
        server = grpc.aio.server()
        client_pb2_grpc.add_InferenceServicer_to_server(router, server)
        addresses[f"router-{number}"] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    urls = dict.fromkeys(addresses, NOWHERE)
    try:
        async with Clients(
            urls, RIGHT, deadline_s=deadline_s, api_key="k", grpc_addresses=addresses
        ) as made:
            yield made
    finally:
        for server in servers:
            await server.stop(0)


@pytest.fixture(autouse=True)
def all_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRPC_EVERY", 1)


GOOD: tuple[list[bytes], ...] = ([b"a"], [], ["ü".encode(), b"\xe6"], [b"d"])
BUSY: Abort = (CODE.UNAVAILABLE, (*SAID, ("retry-after", "1")))
ERROR: Abort = (CODE.INTERNAL, SAID)
BROKEN_OFF: Abort = (CODE.UNAVAILABLE, ())


@pytest.mark.parametrize(
    ("parts", "outcome", "tokens"),
    [
        (GOOD, Outcome.RIGHT, 4),
        ((*GOOD, [b"e"]), Outcome.WRONG, 5),
        (GOOD[:-1], Outcome.WRONG, 3),
        (([b"x"], *GOOD[1:]), Outcome.WRONG, 4),
        ((BUSY,), Outcome.REFUSED, 0),
        (([b"a"], BUSY), Outcome.FAILED, 1),
        ((ERROR,), Outcome.FAILED, 0),
        (([b"a"], ERROR), Outcome.FAILED, 1),
        (([b"x"], ERROR), Outcome.WRONG, 1),
        (([b"a"], BROKEN_OFF), Outcome.CUT, 1),
        (([b"b"], BROKEN_OFF), Outcome.WRONG, 1),
        (((CODE.DEADLINE_EXCEEDED, ()),), Outcome.FAILED, 0),
    ],
)
async def test_what_an_answer_counts_as(
    parts: tuple[list[bytes] | Abort, ...], outcome: Outcome, tokens: int
) -> None:
    router = Scripted(*parts)
    async with clients_of(router) as clients:
        trace = await clients.ask(ASK)
    assert (trace.outcome, len(trace.tokens), trace.tries) == (outcome, tokens, 1)
    assert trace.by_grpc
    for choice in trace.answer.choices.values():
        assert len(choice.token_s) == tokens and choice.token_s == sorted(choice.token_s)
    assert bool(trace.detail) is (outcome is not Outcome.RIGHT)
    (asked,) = router.requests
    assert (asked.prompt, asked.max_tokens, asked.logprobs) == ("a river", 4, 0)
    assert asked.ignore_eos and asked.HasField("temperature") and asked.temperature == 0
    assert router.keys == ["Bearer k"] and 4 < router.left_s[0] < 5.1


@pytest.mark.parametrize("usage", [None, (3, 5), (2, 4)])
async def test_the_usage_is_compared(usage: tuple[int, int] | None) -> None:
    async with clients_of(Scripted(*GOOD, usage=usage)) as clients:
        trace = await clients.ask(ASK)
    assert trace.outcome is Outcome.WRONG and trace.detail.startswith(f"usage {usage}")


async def test_choices_are_kept_apart() -> None:
    async with clients_of(Scripted(*GOOD, choice=1)) as clients:
        trace = await clients.ask(ASK)
    assert trace.outcome is Outcome.WRONG and trace.detail.startswith("choices [1]")


@pytest.mark.parametrize("kind", Kind)
async def test_every_kind_can_be_asked_for(kind: Kind) -> None:
    router = Scripted(*GOOD)
    async with clients_of(router) as clients:
        trace = await clients.ask(Ask(0, "a river", 4, kind))
    assert trace.outcome is Outcome.RIGHT
    (asked,) = router.requests
    assert asked.HasField("seed") is (kind in (Kind.SEEDED, Kind.CHOICES))
    assert (asked.temperature > 0) is (kind in (Kind.SEEDED, Kind.CHOICES, Kind.UNSEEDED))
    assert (asked.n == 2) is (kind is Kind.CHOICES)
    assert bool(asked.stop) is (kind is Kind.STOP)
    assert (asked.presence_penalty > 0) is (kind is Kind.PENALTIES)


async def test_a_client_changes_router_when_one_fails_before_a_token() -> None:
    async with clients_of(Scripted(BROKEN_OFF), Scripted(*GOOD)) as clients:
        traces = [await clients.ask(ASK) for _ in range(2)]
    assert {trace.outcome for trace in traces} == {Outcome.RIGHT}
    assert sorted(trace.tries for trace in traces) == [1, 2]


async def test_a_request_fails_where_no_server_listens() -> None:
    urls = {"router-0": NOWHERE, "router-1": NOWHERE}
    addresses = dict.fromkeys(urls, "127.0.0.1:9")
    async with Clients(
        urls, RIGHT, deadline_s=5, grpc_addresses=addresses, connect_s=0.1
    ) as clients:
        trace = await clients.ask(ASK)
    assert (trace.outcome, trace.tries) == (Outcome.FAILED, 2)
    assert "no connection within 0.1 s" in trace.detail


async def test_a_client_may_go_away_at_a_token() -> None:
    router = Scripted(*GOOD)
    async with clients_of(router) as clients:
        trace = await clients.ask(ASK, leave=lambda trace: len(trace.tokens) >= 2)
    assert (trace.outcome, trace.tokens) == (Outcome.LEFT, TOKENS[:3])


async def test_every_fourth_asks_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRPC_EVERY", 4)
    async with clients_of(Scripted(*GOOD)) as clients:
        traces = [await clients.ask(ASK) for _ in range(8)]
    assert [trace.by_grpc for trace in traces] == [False, False, False, True] * 2
    assert {t.outcome for t in traces if t.by_grpc} == {Outcome.RIGHT}
    assert {t.outcome for t in traces if not t.by_grpc} == {Outcome.FAILED}
