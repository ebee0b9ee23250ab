"""Three times as many requests as the workers can bear, through the router's own HTTP routes: what
would be late is refused unread, and what is served stays what it was.

On virtual time, so every figure is exact: router and workers are the production code; machines,
network and engine (a hash) are simulated. No socket: a client is what the app is given.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import orjson
import pytest
import structlog
from starlette.types import Message, Scope

from baton.models.embedded import embedded_model
from baton.router.answers.request_handler import RequestServices
from baton.router.client_access.router import Router
from baton.router.http_frontend.app import build_app
from baton.router.http_frontend.auth_middleware import AuthMiddleware
from baton.router.requests.body_budget import body_budget
from baton.router.requests.loop_budget import LoopBudget
from baton.router.requests.validator import Validator
from baton.router.text.tokenizer import HfTokenizer
from baton.runtime import logs
from baton.runtime.config import Config, PoolConfig, RouterConfig, StepConfig
from baton.simulation.fleet.world import KEY, World
from baton.simulation.virtual.virtual_loop import VirtualLoop, run
from tests.support.json_values import JsonObject

BLOCK = 4
PROMPT = 8
CHOICES = 2
ASKED: dict[str, JsonObject] = {
    "tokens": {"max_tokens": 16},
    "choices": {"max_tokens": 16, "n": CHOICES},
    "stop strings": {"max_tokens": 32, "stop": ["a"]},  # most end by it, after five tokens
}
BLOCKS = 48  # of each decode worker: for eight requests at once
STEP_S = 0.014  # and as much again for 16 tokens of a batch
WORKERS = {"d0": "decode", "d1": "decode", "p0": "prefill"}
MANY = 60  # clients at once, none of which ever waits: so many are answered as can be
FOR_S = 8.0
DEADLINE_S = 3.0
SHARE = 0.9  # of what is served in time where no more is offered
AT_ONCE_S = 0.001


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    logs.setup("router", "critical")
    yield
    structlog.reset_defaults()


@dataclass(slots=True)
class HttpResponder:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    read: int = 0  # how often the body was asked for
    asked_s: float = 0.0
    took_s: float = 0.0


class Site:
    """A router's app, on a machine of its own."""

    def __init__(self, asked: JsonObject) -> None:
        self._asked = asked
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        config = Config(
            pool=PoolConfig(block_size=BLOCK),
            router=RouterConfig(max_requests=4096),
            step=StepConfig(),
        )
        world = World(self.loop, config, random.Random(1), step_s=STEP_S)
        for name, role in WORKERS.items():
            world.start_worker(name, role, BLOCKS)  # type: ignore[arg-type]  # a Role as it is
        self.process = world.start_router("r0")
        tokenizer = HfTokenizer(embedded_model() / "tokenizer.json")
        self.app = AuthMiddleware(build_app(self._router(config.router, tokenizer)), ())
        self.answers: list[HttpResponder] = []
        self._numbers = itertools.count()

    def _router(self, config: RouterConfig, tokenizer: HfTokenizer) -> Router:
        process = self.process
        validator = Validator("hash", tokenizer, None, frozenset(), CHOICES)
        validator.turns = LoopBudget(
            lambda: 0.0
        )  # by the machine's clock no two runs would be alike
        return Router(
            config=config,
            model="hash",
            started_s=0,
            fleet=process.fleet,
            validator=validator,
            tokenizer=tokenizer,
            serving=RequestServices(process.dispatcher, process.admission, tokenizer),
            bodies=body_budget(config, lambda: self.loop.world_s),
            key=KEY,
        )

    async def ask(self, deadline_s: float) -> HttpResponder:
        began_s = self.loop.world_s
        answer = HttpResponder(asked_s=began_s)
        asking = self.process.machine.spawn(self._ask(answer, deadline_s), "ask")
        await asyncio.wait({asking})
        asking.result()
        answer.took_s = self.loop.world_s - began_s
        self.answers.append(answer)
        return answer

    async def _ask(self, answer: HttpResponder, deadline_s: float) -> None:
        number = next(self._numbers)
        prompt = [5 + (7 * number + 13 * index) % 900 for index in range(PROMPT)]
        content = {"model": "hash", "prompt": prompt, "seed": number, "ignore_eos": True}
        body, left = orjson.dumps(content | self._asked), asyncio.Event()

        async def receive() -> Message:
            answer.read += 1
            if answer.read > 1:
                await left.wait()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status, answer.headers = message["status"], dict(message["headers"])
            else:
                answer.body += message.get("body", b"")

        await self.app(_scope(deadline_s), receive, send)


def _scope(deadline_s: float) -> Scope:
    path = "/v1/completions"
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"x-request-deadline", f"{deadline_s:g}".encode()),
    ]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": headers, "client": ("127.0.0.1", 1), "server": ("localhost", 1),
    }  # fmt: skip


async def most(asked: JsonObject, for_s: float) -> float:
    """Requests a second that the fleet bears, by clients that ask one after the other."""
    site = Site(asked)
    await asyncio.sleep(1.0)
    over_s = site.loop.world_s + for_s

    async def ask_on() -> None:
        while site.loop.world_s < over_s:
            assert (await site.ask(600.0)).status == 200

    await asyncio.gather(*(ask_on() for _ in range(MANY)))
    return len(site.answers) / for_s


async def offered(asked: JsonObject, per_s: float, for_s: float) -> list[HttpResponder]:
    """At random moments, whether or not any has been answered yet."""
    site, dice = Site(asked), random.Random(2)
    await asyncio.sleep(1.0)
    asking = []
    for _ in range(int(per_s * for_s)):
        asking.append(asyncio.create_task(site.ask(DEADLINE_S)))
        await asyncio.sleep(dice.expovariate(per_s))
    await asyncio.gather(*asking)
    return site.answers


def good(answers: list[HttpResponder]) -> int:
    return sum(answer.status == 200 and answer.took_s <= DEADLINE_S for answer in answers)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(asked, id=name, marks=[] if name == "tokens" else pytest.mark.nightly)
        for name, asked in ASKED.items()
    ],
)
def test_goodput_beyond_what_it_bears_and_refusals_at_once(asked: JsonObject) -> None:
    per_s = run(most(asked, FOR_S))
    once, thrice = run(offered(asked, per_s, FOR_S)), run(offered(asked, 3 * per_s, FOR_S))
    assert good(once) > 0.9 * per_s * FOR_S
    assert good(thrice) >= SHARE * good(once)
    assert {answer.status for answer in thrice} <= {200, 503, 504}
    refused = [answer for answer in thrice if answer.status == 503]
    assert len(refused) > len(thrice) / 3  # who comes once too often at least
    for answer in refused:
        assert int(answer.headers[b"retry-after"]) >= 1
        assert answer.read == 0 and answer.took_s < AT_ONCE_S
