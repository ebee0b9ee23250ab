"""A conversation whose prefill worker was restarted: its next turn is computed where it lies.
On virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import structlog

from baton.runtime import logs
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.history import FINISHED, Ask, History, serve
from baton.simulation.fleet.world import World
from baton.simulation.invariants.checks import Watch
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop

TURN_TOKENS = 90
NEXT_TOKENS = 12  # of the second turn, beyond the first


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    logs.setup("lab", "critical")
    yield
    structlog.reset_defaults()


class Conversation:
    """A prefill worker, a decode worker and a router, watched as the lab watches them."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        config = draw(0).config
        router = replace(config.router, placement="auto", read_cached=False)
        self.world = World(loop, replace(config, router=router), random.Random(1), step_s=0.01)
        self.watch = Watch(self.world)
        self.world.started, self.world.router_started = self.watch.over, self.watch.over_router
        decide = self.world.exchange.decide
        self.world.exchange.decide = lambda attempt: self.watch.posted(attempt, decide(attempt))
        self.world.start_worker("p0", "prefill", 80)
        self.world.start_worker("d0", "decode", 80)
        self.router = self.world.start_router("r0")

    async def turn(self, number: int, tokens: int) -> None:
        ask = Ask(router="r0", prompt=tuple(range(tokens)), max_tokens=4, deadline_s=20.0)
        history = History(ask, number, asked_s=self._loop.world_s)
        work = serve(self.router, history, lambda: self._loop.world_s)
        await asyncio.wait({self.router.machine.spawn(work, history.request_id)})
        assert history.ends == [FINISHED]

    async def restart_prefill_worker(self) -> None:
        self.world.kill("p0", silent=False)
        await asyncio.sleep(1.0)
        self.world.restart("p0")
        await asyncio.sleep(3.0)


@pytest.mark.parametrize("restarted", [False, True])
def test_turn_is_computed_where_its_prefix_is(restarted: bool) -> None:
    async def main() -> None:
        talk = Conversation()
        with talk.watch.watching_grants():
            await asyncio.sleep(1.0)
            await talk.turn(0, TURN_TOKENS)
            await asyncio.sleep(1.0)  # what is cached has been told
            if restarted:
                await talk.restart_prefill_worker()
            before = talk.world.workers["p0"].engine.steps
            await talk.turn(1, TURN_TOKENS + NEXT_TOKENS)
        assert (talk.world.workers["p0"].engine.steps == before) == restarted
        assert talk.watch.breaches == []

    virtual_loop.run(main())
