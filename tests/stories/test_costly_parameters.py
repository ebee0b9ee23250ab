"""Requests that are valid and as dear as can be, beside those of other clients: whose 99th of 100
takes at most twice as long, and to which nothing else happens.

On virtual time: routers, schedulers and links are the production code. A step takes what a model
of half a billion parameters takes on two cores of a CPU, and its draws what `benchmarks.sampling`
measured there for 152k tokens of vocabulary, each drawn by one core.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import structlog
from numpy.typing import NDArray
from opentelemetry.context import Context

from baton.decode_worker.credit_queue import CreditQueue
from baton.engine.scheduling.batch import StepBatch
from baton.engine.scheduling.draw_costs import DrawCosts
from baton.proto import worker_pb2
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime import logs, metrics
from baton.runtime.config import Config, PoolConfig
from baton.runtime.errors import BatonError
from baton.simulation.fleet import engine_kind
from baton.simulation.fleet.engine_kind import HashKind
from baton.simulation.fleet.world import World
from baton.simulation.mutations.patches import Break, applied
from baton.simulation.virtual.virtual_loop import VirtualLoop, run
from baton.simulation.virtual.virtual_steps import VirtualSteps
from tests.support.metric_values import metric_value

STEP_S = 0.045  # reading the weights
PROMPT_TOKEN_S, ROW_S = 0.0014, 0.0007  # what a token adds, of a prompt and of a sequence
COSTS = DrawCosts(
    greedy_s=0.0003, random_s=0.0003, cut_s=0.0018, adjusted_s=0.0014, logprobs_s=0.0006
)
BY_SORT = replace(COSTS, cut_s=0.04)  # as long as a draw took when rows were sorted together
BLOCK, VOCAB = 16, 1024  # as many tokens as `logit_bias` may name
RATE, FOR_S, TOKENS = 4.0, 20.0, 16
COSTLY_TOKENS = 48
# Longer prompts fill the one prefill worker by themselves, whatever their parameters are: eight
# clients of 8,000 tokens are 11 s of prefill each, which is overload (test_overload.py).
LONG_CONTEXT = 4096
COSTLY = 8  # under way at every moment
WARM_S = 3.0  # of workers, and then of routers, which learn what steps take from the first requests


def sampling(**fields: Any) -> worker_pb2.Sampling:
    neutral = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}
    return worker_pb2.Sampling(**{**neutral, **fields})


@dataclass(frozen=True, slots=True)
class Costly:
    sampling: worker_pb2.Sampling
    choices: int = 1
    prompt_tokens: int = 20
    stop_token_ids: tuple[int, ...] = ()


KINDS = {
    "choices": Costly(sampling(temperature=1.0), choices=16),
    "bias": Costly(sampling(logit_bias=dict.fromkeys(range(VOCAB), 0.5))),
    "stop tokens": Costly(sampling(), stop_token_ids=tuple(range(VOCAB, VOCAB + 64))),
    "logprobs": Costly(sampling(top_logprobs=20)),
    "penalties over a long context": Costly(
        sampling(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
        prompt_tokens=LONG_CONTEXT - COSTLY_TOKENS,
    ),
    "top-p near one": Costly(sampling(temperature=2.0, top_p=0.9999)),
    "top-k of nearly all": Costly(sampling(temperature=1.0, top_k=VOCAB - 1)),
    "all at once": Costly(
        sampling(
            temperature=2.0, top_p=0.9999, top_k=VOCAB - 1, top_logprobs=20, presence_penalty=1
        ),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine_kind, "VOCAB", VOCAB)
    logs.setup("router", "critical")
    yield
    structlog.reset_defaults()


class Priced(HashKind):
    """Hashes, of which a step takes what a model's would."""

    def __init__(self, costs: DrawCosts) -> None:
        super().__init__()
        self.costs = costs

    def make(
        self, blocks: int, block_size: int, step_s: Callable[[StepBatch], float]
    ) -> tuple[VirtualSteps, NDArray[np.uint8]]:
        def priced(batch: StepBatch) -> float:
            counts = [len(piece.tokens) for piece in batch.slices]
            tokens_s = sum(ROW_S if count == 1 else PROMPT_TOKEN_S * count for count in counts)
            return STEP_S + tokens_s + self.costs.batch_s(batch)

        engine, array = super().make(blocks, block_size, priced)
        engine.draw_costs = COSTS  # type: ignore[attr-defined] # as if they had been measured
        return engine, array


@dataclass(slots=True)
class Seen:
    """Of other clients: how long each took, and what else came of them."""

    took_s: list[float] = field(default_factory=list)
    failed: list[BatonError] = field(default_factory=list)
    migrations: int = 0
    costly: int = 0  # answers of the costly ones

    def percentile_s(self, part: float) -> float:
        return sorted(self.took_s)[int(part * (len(self.took_s) - 1))]


class Site:
    def __init__(self, costs: DrawCosts) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        config = Config(pool=PoolConfig(block_size=BLOCK))
        world = World(self.loop, config, random.Random(5), kind=Priced(costs))
        for name, role in {"d0": "decode", "d1": "decode", "p0": "prefill"}.items():
            world.start_worker(name, role, 4000)  # type: ignore[arg-type]  # a Role as it is
        self.process = world.start_router("r0")
        self.seen = Seen()
        self._count = 0

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._count += 1
        task: asyncio.Task[None] = self.process.machine.spawn(work, f"client {self._count}")
        return task

    async def ask(self, request: ValidatedRequest) -> int:
        """Its migrations. Raises what it ended with."""
        self._count += 1
        deadline_s = asyncio.get_running_loop().time() + 300
        active_request = await self.process.dispatcher.start(
            request, f"request-{self._count}", Context(), deadline_s
        )
        while await active_request.next():
            pass
        return active_request.migrations

    async def other(self) -> None:
        prompt = tuple((self._count * 7 + index) % VOCAB for index in range(20))
        began_s = self.loop.world_s
        try:
            self.seen.migrations += await self.ask(ValidatedRequest(prompt, sampling(), TOKENS))
        except BatonError as error:
            self.seen.failed.append(error)
            return
        self.seen.took_s.append(self.loop.world_s - began_s)

    async def costly(self, kind: Costly, until_s: float) -> None:
        while self.loop.world_s < until_s:
            prompt = tuple(
                (self._count * 11 + index) % VOCAB for index in range(kind.prompt_tokens)
            )
            request = ValidatedRequest(
                prompt,
                kind.sampling,
                COSTLY_TOKENS,
                kind.choices,
                stop_token_ids=kind.stop_token_ids,
            )
            await self.ask(request)
            self.seen.costly += 1


async def served(kind: Costly | None, costs: DrawCosts) -> Seen:
    site, dice = Site(costs), random.Random(4)
    await asyncio.sleep(WARM_S)
    costly_s = site.loop.world_s + WARM_S
    until_s = costly_s + FOR_S
    tasks: list[asyncio.Task[None]] = []
    while site.loop.world_s < until_s:
        if kind and site.loop.world_s >= costly_s:
            tasks += [site.spawn(site.costly(kind, until_s)) for _ in range(COSTLY)]
            costly_s = until_s  # once
        tasks.append(site.spawn(site.other()))
        await asyncio.sleep(dice.expovariate(RATE))
    await asyncio.wait(tasks)
    for task in tasks:
        task.result()
    return site.seen


def hangs() -> float:
    return sum(metric_value(metrics.HANGS.labels(role)) for role in ("prefill", "decode"))


def broken_promises(kind: Costly, costs: DrawCosts) -> list[str]:
    alone = run(served(None, costs), 600.0)
    before = hangs()
    beside = run(served(kind, costs), 600.0)
    found = []
    ratio = beside.percentile_s(0.99) / alone.percentile_s(0.99)
    if ratio > 2:
        found.append(f"others take {ratio:.2f} times as long")
    if beside.failed or beside.migrations:
        found.append(f"{len(beside.failed)} others failed, {beside.migrations} moved")
    if hangs() > before:
        found.append(f"{hangs() - before} workers were taken for hung")
    if beside.costly < COSTLY:
        found.append(f"{beside.costly} costly requests were answered")
    return found


# Those of `make test`; `make nightly` has the others.
REPRESENTATIVES = {"choices", "all at once"}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=[] if name in REPRESENTATIVES else pytest.mark.nightly)
        for name, kind in KINDS.items()
    ],
)
def test_others_take_at_most_twice_as_long(kind: Costly) -> None:
    assert broken_promises(kind, COSTS) == []


@pytest.mark.nightly
def test_draws_by_a_sort_would_break_it() -> None:
    assert broken_promises(KINDS["top-p near one"], BY_SORT) != []


@pytest.mark.nightly
def test_choices_without_a_share_of_the_batch_would_break_it() -> None:
    whole = Break("all may be taken", CreditQueue, "_room_for_choices", lambda _: _any_number)
    with applied(whole):
        assert broken_promises(KINDS["choices"], COSTS) != []


def _any_number(self: CreditQueue, running: object, granted: object) -> Callable[[int], bool]:
    return lambda count: True
