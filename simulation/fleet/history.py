"""The history that the lab checks: requests of a client, and its answers.

An `Ask` is a request as a client sends it; a `History` holds what that client saw, and survives
the router that served it. `expected` is what a run without any fault gives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.context import Context

from baton.engine.scheduling.batch import Drawn
from baton.proto import worker_pb2
from baton.router.answers.request_handler import Arrival, RequestServices, Usage
from baton.router.dispatch.active_request import ActiveRequest, OutputToken
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime.errors import BatonError
from baton.runtime.sampling import SamplingParams
from baton.simulation.fleet.client_view import TOKENIZER, ClientView
from baton.simulation.fleet.engine_kind import HASHES, VOCAB, EngineKind
from baton.simulation.fleet.lab_vocabulary import lab_vocabulary
from baton.simulation.fleet.world import RouterProcess


@dataclass(frozen=True, slots=True)
class Ask:
    """`leaves_s`: the client goes so long after it asked. `enough`: a stop string ends each
    choice after so many tokens. `reads_s`: it takes so long for what it is sent at once."""

    router: str
    prompt: tuple[int, ...]
    max_tokens: int
    choices: int = 1
    temperature: float = 0.0
    penalty: float = 1.0  # of repetition: draws then hang on prompt and output, apart
    seed: int = 1
    stops: tuple[int, ...] = ()
    salt: bytes = b""
    deadline_s: float = 60.0
    leaves_s: float | None = None
    enough: int | None = None
    reads_s: float = 0.0
    top_logprobs: int | None = None
    grammar: str = ""  # in the form of the product's matchers; "", as in `Submit`: none

    def request(self) -> ValidatedRequest:
        sampling = worker_pb2.Sampling(
            temperature=self.temperature,
            top_p=1.0,
            repetition_penalty=self.penalty,
            seed=self.seed,
            top_logprobs=self.top_logprobs,
        )
        if self.grammar:
            digest = lab_vocabulary(VOCAB).digest
            sampling.grammar.MergeFrom(worker_pb2.Grammar(text=self.grammar, vocabulary=digest))
        return ValidatedRequest(
            prompt=self.prompt,
            sampling=sampling,
            max_tokens=self.max_tokens,
            choices=self.choices,
            stop_token_ids=self.stops,
            cache_salt=self.salt,
        )

    def drawn(
        self, choice: int, count: int | None = None, kind: EngineKind = HASHES
    ) -> list[Drawn]:
        """Return the draws of a choice in a run without faults: the first `count`, or all."""
        params = SamplingParams(
            temperature=self.temperature,
            repetition_penalty=self.penalty,
            seed=self.seed,
            top_logprobs=self.top_logprobs,
        )
        wanted = self.max_tokens if count is None else min(count, self.max_tokens)
        drawn = kind.drawn(self.prompt, wanted, params, choice, self.grammar)
        for index, one in enumerate(drawn):
            if one.token in self.stops:
                return drawn[: index + 1]
        return drawn

    def expected(self, choice: int) -> list[int]:
        """All tokens of a choice, as a run without faults gives them."""
        return [one.token for one in self.drawn(choice)]


Logprob = tuple[float | None, tuple[tuple[int, float], ...]]  # the token's, and the best ones

FINISHED, LEFT, ROUTER_LOST = "finished", "left", "router lost"


@dataclass(slots=True, eq=False)
class History:
    """`ends` are FINISHED, LEFT (the client did), ROUTER_LOST, or the code of an error; one."""

    ask: Ask
    number: int
    tokens: list[list[int]] = field(default_factory=list)  # of each choice
    logprobs: list[list[Logprob]] = field(default_factory=list)  # beside each token
    finishes: list[list[str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    detail: str = ""
    asked_s: float = 0.0  # the world's clock
    rate: float = 1.0  # of its router's clock
    ended_s: float = 0.0
    migrations: int = 0
    text: list[str] = field(default_factory=list)  # of each choice, as the router shows it
    usage: Usage | None = None  # that an answer ends with
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.ask.choices)]
        self.logprobs = [[] for _ in range(self.ask.choices)]
        self.text = [""] * self.ask.choices
        self.finishes = [[] for _ in range(self.ask.choices)]

    @property
    def request_id(self) -> str:
        return f"req-{self.number}"

    def end(self, how: str, now_s: float, detail: str = "") -> None:
        self.ends.append(how)
        self.ended_s = now_s
        self.detail = detail


async def serve(router: RouterProcess, history: History, clock: Callable[[], float]) -> None:
    """Same as the router's answer to its client (router/answers/request_handler.py). Runs in
    the router's process; the clock is the world's."""
    try:
        with router.admission.ticket():
            await _serve(router, history)
    except BatonError as error:
        history.end(error.code, clock(), str(error))
    except asyncio.CancelledError:
        history.end(LEFT, clock())
        raise
    else:
        history.end(FINISHED, clock())


async def _serve(router: RouterProcess, history: History) -> None:
    ask = history.ask
    deadline_s = asyncio.get_running_loop().time() + ask.deadline_s
    serving = RequestServices(router.dispatcher, router.admission, TOKENIZER)
    arrival = Arrival(0.0, deadline_s, Context())
    view = ClientView(serving, ask.request(), history.request_id, arrival)
    await view.begin()
    active_request = view.begun()
    try:
        while (pieces := await view.next()) is not None:
            view.take(pieces, history.text)
            for output in view.outputs:
                _take(router, active_request, history, output)
            if ask.reads_s:
                # The client that this simulates reads slowly.
                await asyncio.sleep(ask.reads_s)
        history.usage = view.usage()
    finally:
        history.migrations = active_request.migrations
        view.leave()


def _take(
    router: RouterProcess, active_request: ActiveRequest, history: History, output: OutputToken
) -> None:
    """Record an output, except after a stop string: the router drops those too."""
    choice, enough = output.choice, history.ask.enough
    tokens = history.tokens[choice]
    if enough is not None and len(tokens) >= enough:
        return
    if output.token is not None:
        tokens.append(output.token)
        history.logprobs[choice].append((output.logprob, output.top))
    if output.finish is not None:
        history.finishes[choice].append(output.finish)
    elif enough is not None and len(tokens) >= enough:
        history.finishes[choice].append("enough")
        if not active_request.choices[choice].ended:
            router.dispatcher.finish_choice(active_request, choice)
