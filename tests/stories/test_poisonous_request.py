"""A request at which every step hangs, among many others: it stands alone after two hangs,
and ends by name after a third; the others are answered.

On virtual time: routers and workers are the production code, machines and engine are simulated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import pytest
import structlog
from opentelemetry.context import Context

from baton.decode_worker.step_plan import RequestTurns
from baton.engine.scheduling.batch import StepBatch
from baton.proto import worker_pb2
from baton.router.dispatch.attempt import Attempt
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime import logs
from baton.runtime.config import Config, PoolConfig, RouterConfig, StepConfig
from baton.runtime.errors import BatonError, EngineError
from baton.runtime.sampling import SamplingParams
from baton.simulation.fleet.engine_kind import HASHES
from baton.simulation.fleet.world import WorkerProcess, World
from baton.simulation.mutations.patches import Break, applied
from baton.simulation.virtual.virtual_loop import VirtualLoop, run

BLOCK = 4
STEP_S = 0.01
HANG_S = 30.0
POISON = 666  # the seed of the request; of the others it is their number
OTHERS = 60
TOKENS = 80
PREFILLERS = ("p0", "p1", "p2")
DECODERS = ("d0", "d1", "d2", "d3")


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    logs.setup("router", "critical")
    yield
    structlog.reset_defaults()


@dataclass(slots=True)
class Answer:
    number: int
    tokens: list[int] = field(default_factory=list)
    error: BatonError | None = None
    migrations: int = 0


class Site:
    """`hung`: the numbers of the requests in each step that hung, the first of each worker: the one
    after it was planned before any worker could know."""

    def __init__(self, roles: frozenset[str]) -> None:
        self._roles = roles
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        config = Config(
            pool=PoolConfig(block_size=BLOCK),
            router=RouterConfig(placement="disaggregated"),
            step=StepConfig(),
        )
        self.world = World(self.loop, config, random.Random(3), step_s=STEP_S)
        self.hung: list[set[int]] = []
        self._hung_workers: set[str] = set()
        self.world.started = self._watch
        for name in PREFILLERS:
            self.world.start_worker(name, "prefill", 400)
        for name in DECODERS:
            self.world.start_worker(name, "decode", 400)
        self.process = self.world.start_router("r0")

    def _watch(self, process: WorkerProcess) -> None:
        before = process.engine.step_s

        def step_s(batch: StepBatch) -> float:
            seeds = {draw.params.seed for piece in batch.slices for draw in piece.draws}
            hangs = process.role in self._roles and POISON in seeds
            if hangs and process.machine.name not in self._hung_workers:
                self._hung_workers.add(process.machine.name)
                self.hung.append(seeds)
            return before(batch) + HANG_S * hangs

        process.engine.step_s = step_s

    async def ask(self, number: int) -> Answer:
        answer = Answer(number)
        asking = self.process.machine.spawn(self._ask(answer), f"ask {number}")
        await asyncio.wait({asking})
        asking.result()
        return answer

    async def _ask(self, answer: Answer) -> None:
        request = ValidatedRequest(prompt(answer.number), sampling(answer.number), TOKENS)
        deadline_s = asyncio.get_running_loop().time() + 300
        name = f"request-{answer.number}"
        try:
            active_request = await self.process.dispatcher.start(
                request, name, Context(), deadline_s
            )
            while outputs := await active_request.next():
                answer.tokens += [each.token for each in outputs if each.token is not None]
        except BatonError as error:
            answer.error = error
            return
        answer.migrations = active_request.migrations


def prompt(number: int) -> tuple[int, ...]:
    return tuple((7 * number + 13 * index) % 900 for index in range(10))


def sampling(number: int) -> worker_pb2.Sampling:
    return worker_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0, seed=number)


async def served(roles: frozenset[str]) -> tuple[list[Answer], list[set[int]]]:
    """What all were answered, the poisonous one last."""
    site = Site(roles)
    await asyncio.sleep(3.0)  # workers know how long a step takes
    warm = [asyncio.create_task(site.ask(1000 + number)) for number in range(8)]
    await asyncio.gather(*warm)
    others = [asyncio.create_task(site.ask(number)) for number in range(OTHERS // 2)]
    await asyncio.sleep(0.05)
    poison = asyncio.create_task(site.ask(POISON))
    for number in range(OTHERS // 2, OTHERS):
        await asyncio.sleep(0.3)
        others.append(asyncio.create_task(site.ask(number)))
    return [*await asyncio.gather(*others), await poison], site.hung


def broken_promises(broken: AbstractContextManager[None], *roles: str) -> list[str]:
    with broken:
        answers, hung = run(served(frozenset(roles)), 600.0)
    *others, poison = answers
    found = [
        f"the poisonous request was computed with {len(seeds) - 1} others after two hangs"
        for seeds in hung[2:]
        if len(seeds) > 1
    ]
    if len(hung) > 3:
        found.append(f"{len(hung)} steps hung")
    if not isinstance(poison.error, EngineError) or "no other request" not in str(poison.error):
        found.append(f"the poisonous request ended with {poison.error!r}")
    for answer in others:
        params = SamplingParams(temperature=0.0, seed=answer.number)
        drawn = HASHES.drawn(prompt(answer.number), TOKENS, params, 0, "")
        if answer.tokens != [each.token for each in drawn]:
            found.append(f"request {answer.number} ended with {answer.error!r}")
    return found


@pytest.mark.parametrize(
    "roles",
    [pytest.param(("decode",), marks=pytest.mark.nightly), ("prefill", "decode")],
    ids=" and ".join,
)
def test_two_hangs_set_a_request_apart(roles: tuple[str, ...]) -> None:
    assert broken_promises(nullcontext(), *roles) == []


def test_a_hang_of_prefill_alone_is_passed_by() -> None:
    """Set apart, its prompt is computed where it is decoded, and it is answered."""
    answers, hung = run(served(frozenset({"prefill"})), 600.0)
    assert len(hung) == 2 and answers[-1].error is None
    assert len(answers[-1].tokens) == TOKENS


@pytest.mark.nightly
@pytest.mark.parametrize(
    "broken",
    [
        Break("no hang is counted", Attempt, "alone", lambda _: property(lambda self: False)),
        Break(
            "a step is shared with what is computed alone",
            RequestTurns,
            "next",
            lambda _: lambda self, computable: lambda request: True,
        ),
    ],
    ids=lambda broken: broken.what,
)
def test_shared_suspects_are_seen(broken: Break) -> None:
    assert any("after two hangs" in found for found in broken_promises(applied(broken), "decode"))
