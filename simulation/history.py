"""What a client asks of the lab's fleet, and what it was given: the history that is checked.

An `Ask` is a request as a client sends it; a `History` holds what that client saw, and survives
the router that served it. `expected` is what a run without any fault gives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.context import Context

from baton.proto import worker_pb2
from baton.router.generation import Generation, OutputToken
from baton.router.generation_request import GenerationRequest
from baton.runtime.errors import BatonError
from baton.runtime.sampling import SamplingParams
from baton.simulation.hash_engine import expected_output
from baton.simulation.world import SLABS, VOCAB, RouterProcess


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

    def request(self) -> GenerationRequest:
        sampling = worker_pb2.Sampling(
            temperature=self.temperature,
            top_p=1.0,
            repetition_penalty=self.penalty,
            seed=self.seed,
        )
        return GenerationRequest(
            prompt=self.prompt,
            sampling=sampling,
            max_tokens=self.max_tokens,
            choices=self.choices,
            stop_token_ids=self.stops,
            cache_salt=self.salt,
        )

    def expected(self, choice: int, count: int | None = None) -> list[int]:
        """The tokens of a choice, as a run without faults gives them: the first `count`, or all."""
        params = SamplingParams(
            temperature=self.temperature, repetition_penalty=self.penalty, seed=self.seed
        )
        wanted = self.max_tokens if count is None else min(count, self.max_tokens)
        tokens = expected_output(
            self.prompt, wanted, params, choice=choice, slabs=SLABS, vocab_size=VOCAB
        )
        for place, token in enumerate(tokens):
            if token in self.stops:
                return tokens[: place + 1]
        return tokens


FINISHED, LEFT, ROUTER_LOST = "finished", "left", "router lost"


@dataclass(slots=True, eq=False)
class History:
    """`ends` are FINISHED, LEFT (the client did), ROUTER_LOST, or the code of an error; one."""

    ask: Ask
    number: int
    tokens: list[list[int]] = field(default_factory=list)  # of each choice
    finishes: list[list[str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    detail: str = ""
    asked_s: float = 0.0  # the world's clock
    ended_s: float = 0.0
    migrations: int = 0
    used: list[int] = field(default_factory=list)  # tokens that the router counts, by choice
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.ask.choices)]
        self.finishes = [[] for _ in range(self.ask.choices)]

    @property
    def request_id(self) -> str:
        return f"req-{self.number}"

    def end(self, how: str, now_s: float, detail: str = "") -> None:
        self.ends.append(how)
        self.ended_s = now_s
        self.detail = detail


async def serve(router: RouterProcess, history: History, clock: Callable[[], float]) -> None:
    """What the router's answer does for its client (router/answering.py). Runs in
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
    generation = await router.dispatcher.start(
        ask.request(), history.request_id, Context(), deadline_s
    )
    try:
        while outputs := await generation.next():
            for output in outputs:
                _take(router, generation, history, output)
            if ask.reads_s:
                await asyncio.sleep(ask.reads_s)
    finally:
        history.migrations = generation.migrations
        history.used = [len(choice.accepted) for choice in generation.choices]
        if not generation.over:
            router.dispatcher.cancel(generation)


def _take(
    router: RouterProcess, generation: Generation, history: History, output: OutputToken
) -> None:
    """What follows a stop string is dropped, as the router's text does."""
    choice, enough = output.choice, history.ask.enough
    tokens = history.tokens[choice]
    if enough is not None and len(tokens) >= enough:
        return
    if output.token is not None:
        tokens.append(output.token)
    if output.finish is not None:
        history.finishes[choice].append(output.finish)
    elif enough is not None and len(tokens) >= enough:
        history.finishes[choice].append("enough")
        if not generation.choices[choice].ended:
            router.dispatcher.finish_choice(generation, choice)
