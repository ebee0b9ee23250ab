"""Clients of several routers: each request once, timed, and held against its right answer.

Most ask by HTTP, every fourth by gRPC where routers serve it. A client sends a request to a
router that says it is ready. It asks another router only where the first one itself cannot be
reached or breaks off before any token: that is the client's part of surviving a router.
Everything else counts as what it is. Every request has a deadline, and is given up as hung a
while after it; a gRPC client's library gives up by itself, at the deadline.
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc.aio
import httpx

from chaos import grpc_ask
from chaos.answers import Answer, AnswerPart, of_http
from chaos.asks import Ask, Kind

HUNG_S = 2.0  # after the deadline
CONNECT_S = 1.0
WATCH_S = 0.1
READY_S = 1.0  # for a router to say whether it is ready
GRPC_EVERY = 4


class Outcome(enum.Enum):
    RIGHT = "right"
    WRONG = "wrong"  # another token than the fault-free one, one too many or few, another end
    FAILED = "failed"  # an error that says why
    REFUSED = "refused"  # 503 with Retry-After, before any token: overload, reported at once
    CUT = "cut"  # the stream broke off after a token without a word: its router is gone
    HUNG = "hung"  # no end, long after the deadline
    LEFT = "left"  # the client went away, as its scenario wants


@dataclass(slots=True)
class Trace:
    """One request as its client saw it; times are of the loop's clock. `ask`: its number."""

    ask: int
    started_s: float
    kind: Kind = Kind.GREEDY
    by_grpc: bool = False
    router: str = ""
    tries: int = 0
    answer: Answer = field(default_factory=Answer)
    ended_s: float = 0.0
    outcome: Outcome | None = None  # None: under way
    detail: str = ""

    @property
    def tokens(self) -> list[str]:
        return self.answer.tokens


class _Unreached(Exception):
    """The router could not be connected to, or broke off before it said a token."""


class Clients:
    """`urls`: the routers now, by name; it may change. `right`: the answer to every ask.
    `grpc_addresses`: as `urls`, empty where all are to ask by HTTP."""

    def __init__(
        self,
        urls: Mapping[str, str],
        right: Mapping[int, Answer],
        *,
        deadline_s: float,
        api_key: str = "",
        connect_s: float = CONNECT_S,
        grpc_addresses: Mapping[str, str] | None = None,
    ) -> None:
        self.deadline_s = deadline_s
        self.ready: set[str] = set()
        self.traces: list[Trace] = []
        self._urls = urls
        self._right = right
        self._grpc_addresses = grpc_addresses or {}
        self._asked = self._turn = 0
        self._api_key = api_key
        self._connect_s = connect_s

    async def __aenter__(self) -> Clients:
        limits = httpx.Limits(max_keepalive_connections=0)  # each request a client of its own
        timeout = httpx.Timeout(None, connect=self._connect_s)
        key = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._http = httpx.AsyncClient(limits=limits, timeout=timeout, headers=key)
        self._watching = [asyncio.create_task(self._watch(name)) for name in self._urls]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._http.aclose()

    async def ask(
        self, ask: Ask, deadline_s: float = 0.0, leave: Callable[[Trace], bool] | None = None
    ) -> Trace:
        """Send it, and take its answer to the end. `leave`: asked after each token."""
        self._asked += 1
        by_grpc = bool(self._grpc_addresses) and self._asked % GRPC_EVERY == 0
        trace = Trace(ask.number, asyncio.get_running_loop().time(), ask.kind, by_grpc)
        self.traces.append(trace)
        within_s = deadline_s or self.deadline_s
        try:
            async with asyncio.timeout(within_s + HUNG_S):
                trace.outcome = await self._any_router(ask, trace, within_s, leave)
        except TimeoutError:
            trace.outcome = Outcome.HUNG
        except asyncio.CancelledError:
            trace.outcome = Outcome.LEFT
            raise
        finally:
            trace.ended_s = asyncio.get_running_loop().time()
        return trace

    async def _any_router(
        self, ask: Ask, trace: Trace, within_s: float, leave: Callable[[Trace], bool] | None
    ) -> Outcome:
        left = list(self._urls)
        while left:
            trace.router = self._choose(left)
            left.remove(trace.router)
            trace.tries += 1
            try:
                one_router = self._by_grpc if trace.by_grpc else self._by_http
                return await one_router(ask, trace, within_s, leave)
            except _Unreached as error:
                trace.detail = str(error)
        return Outcome.FAILED

    def _choose(self, among: Sequence[str]) -> str:
        ready = [name for name in among if name in self.ready] or among
        self._turn += 1
        return ready[self._turn % len(ready)]

    async def _by_grpc(
        self, ask: Ask, trace: Trace, within_s: float, leave: Callable[[Trace], bool] | None
    ) -> Outcome:
        address = self._grpc_addresses[trace.router]
        try:
            async with grpc_ask.asked(
                address, ask, within_s, self._api_key, self._connect_s
            ) as messages:
                async for heard in messages:
                    self._heard(trace, heard)
                    if leave is not None and leave(trace):
                        return Outcome.LEFT
        except grpc_ask.NoConnection as error:
            raise _Unreached(f"{trace.router}: {error}") from error
        except grpc.aio.AioRpcError as error:
            return self._ended(trace, grpc_ask.end_of(error))
        return self._judge(trace)

    def _ended(self, trace: Trace, end: grpc_ask.End) -> Outcome:
        """A call that is over by its own deadline has failed, whichever side says so."""
        trace.detail = f"{trace.router}: {end.detail}"
        if end.by_router or end.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            refused = end.busy and not trace.tokens
            return Outcome.REFUSED if refused else self._broken(trace, Outcome.FAILED)
        if not trace.tokens:
            raise _Unreached(trace.detail)
        return self._broken(trace, Outcome.CUT)

    async def _by_http(
        self, ask: Ask, trace: Trace, within_s: float, leave: Callable[[Trace], bool] | None
    ) -> Outcome:
        url = f"{self._urls[trace.router]}/v1/completions"
        headers = {"X-Request-Deadline": f"{within_s:.3f}"}
        try:
            async with self._http.stream("POST", url, json=ask.body(), headers=headers) as answer:
                if answer.status_code != 200:
                    return await self._refused(answer, trace)
                if ask.kind is Kind.WHOLE:
                    trace.answer.add(of_http(json.loads(await answer.aread())))
                    return self._judge(trace)
                return await self._streamed(answer, trace, leave)
        except httpx.TransportError as error:
            said = f"{trace.router}: {type(error).__name__} {error}"
            if not trace.tokens:
                raise _Unreached(said) from error
            trace.detail = said
            return self._broken(trace, Outcome.CUT)

    async def _refused(self, answer: httpx.Response, trace: Trace) -> Outcome:
        text = (await answer.aread()).decode(errors="replace")
        trace.detail = f"{answer.status_code} {text[:300]}"
        heard = answer.status_code in (429, 503) and "retry-after" in answer.headers
        return Outcome.REFUSED if heard else Outcome.FAILED

    async def _streamed(
        self, answer: httpx.Response, trace: Trace, leave: Callable[[Trace], bool] | None
    ) -> Outcome:
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return self._judge(trace)
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                trace.detail = json.dumps(event["error"])
                return self._broken(trace, Outcome.FAILED)
            self._heard(trace, of_http(event))
            if leave is not None and leave(trace):
                return Outcome.LEFT
        trace.detail = f"{trace.router}: the stream ended without a word"
        if not trace.tokens:
            raise _Unreached(trace.detail)
        return self._broken(trace, Outcome.CUT)

    def _heard(self, trace: Trace, heard: AnswerPart) -> None:
        trace.answer.add(heard, asyncio.get_running_loop().time())

    def _judge(self, trace: Trace) -> Outcome:
        difference = trace.answer.differs(
            self._right[trace.ask],
            usage=trace.by_grpc or trace.kind in (Kind.WHOLE, Kind.USAGE),
            redrawn=trace.kind is Kind.UNSEEDED,
        )
        if difference is None:
            return Outcome.RIGHT
        trace.detail = difference
        return Outcome.WRONG

    def _broken(self, trace: Trace, otherwise: Outcome) -> Outcome:
        """Judge an answer that did not come to its end: what came must be its beginning."""
        redrawn = trace.kind is Kind.UNSEEDED
        if trace.answer.begins(self._right[trace.ask], redrawn=redrawn):
            return otherwise
        trace.detail = f"{trace.answer} before {trace.detail}"
        return Outcome.WRONG

    async def _watch(self, name: str) -> None:
        while True:
            good = False
            with suppress(httpx.TransportError):
                answer = await self._http.get(f"{self._urls[name]}/readyz", timeout=READY_S)
                good = answer.status_code == 200
            (self.ready.add if good else self.ready.discard)(name)
            # A router's readiness can only be asked for again, as a balancer does.
            await asyncio.sleep(WATCH_S)


async def offer(
    clients: Clients, wanted: Sequence[Ask], per_s: float, over: asyncio.Event
) -> list[asyncio.Task[Trace]]:
    """Start asks in turn at an even pace until `over` is set, however they fare; their tasks."""
    clock = asyncio.get_running_loop().time
    tasks: list[asyncio.Task[Trace]] = []
    next_s = clock()
    while not over.is_set():
        tasks.append(asyncio.create_task(clients.ask(wanted[len(tasks) % len(wanted)])))
        next_s += 1 / per_s
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, next_s - clock())):
                await over.wait()
    return tasks


async def capacity(
    clients: Clients, wanted: Sequence[Ask], *, clients_at_once: int, for_s: float
) -> float:
    """Requests a second that end well while so many clients ask without pause. The first third
    of the time warms up."""
    clock = asyncio.get_running_loop().time
    began, turn = clock(), iter(range(1 << 30))

    async def keep_asking() -> None:
        while clock() < began + for_s:
            await clients.ask(wanted[next(turn) % len(wanted)])

    await asyncio.gather(*(keep_asking() for _ in range(clients_at_once)))
    from_s, until_s = began + for_s / 3, began + for_s
    good = [t for t in clients.traces if t.outcome is Outcome.RIGHT]
    return sum(from_s <= t.ended_s < until_s for t in good) / (until_s - from_s)
