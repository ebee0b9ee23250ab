"""A scenario, and its stage: a running cluster, its clients, and the means to hurt it.

A stage lasts for one run of one scenario. Calls that block go to a thread, so that the clients'
clock runs on. Knows no verdicts; what a scenario finds wrong by itself it notes in `broken`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from chaos.asks import Ask
from chaos.clients import Clients, Trace
from chaos.cluster import Cluster
from chaos.hosts import Hosts
from chaos.network import Network, Way
from chaos.small_disk import SmallDisk


@dataclass(slots=True)
class Stage:
    """`hold_s`: how long a fault lasts. `longs`: asks that take much memory."""

    cluster: Cluster
    clients: Clients
    asks: Sequence[Ask]
    longs: Sequence[Ask]
    hold_s: float
    network: Network | None = None
    disk: SmallDisk | None = None
    hosts: Hosts | None = None
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    void: str | None = None

    async def do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(call, *arguments)

    async def hold(self) -> None:
        await asyncio.sleep(self.hold_s)  # A fault lasts for this time.

    def named(self, role: str) -> list[str]:
        return [name for name in self.cluster.names() if name.startswith(role)]

    async def kill(self, *names: str) -> None:
        await asyncio.gather(*(self.do(self.cluster.kill, name) for name in names))

    async def strike(self, *names: str) -> None:
        """`kill -9`; they are started again once the fault is over."""
        await self.kill(*names)
        await self.hold()
        await self.back()

    async def back(self) -> None:
        """Start again whatever has ended, as its supervisor would, and wait until it serves."""
        dead = [name for name in self.cluster.names() if not self.cluster.alive(name)]
        for name in sorted(
            dead
        ):  # workers first: the wait for a router fails while others are dead
            if name.startswith("router"):
                await self.do(self.cluster.start_router, name)
            else:
                await self.do(self.cluster.start_worker, name.split("-")[0], name)
        await self.whole()

    async def whole(self) -> None:
        """Wait until every worker is announced and linked to every router."""
        await self.do(self.cluster.wait_ready, len(self.cluster.workers()))

    async def pause(self, name: str) -> None:
        """SIGSTOP for as long as faults last."""
        self.cluster.kill(name, signal.SIGSTOP)
        try:
            await self.hold()
        finally:
            self.cluster.kill(name, signal.SIGCONT)
        await self.whole()

    async def cut(self, name: str, way: Way) -> None:
        assert self.network is not None
        await self.do(self.network.cut, name, way)
        try:
            await self.hold()
        finally:
            await self.do(self.network.heal, name)
        await self.whole()

    async def part(self, name: str, other: str) -> None:
        assert self.network is not None
        await self.do(self.network.part, name, other)
        try:
            await self.hold()
        finally:
            await self.do(self.network.join, name, other)

    async def leave(self, ask: Ask, after_s: float) -> None:
        """A client that goes away after a while, wherever its request is then."""
        asking = asyncio.create_task(self.clients.ask(ask))
        await asyncio.wait({asking}, timeout=after_s)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking

    async def leave_at(self, ask: Ask, token: int) -> Trace:
        """A client that goes away once it has so many tokens."""
        return await self.clients.ask(ask, leave=lambda trace: len(trace.tokens) >= token)


Transport = Literal["memory", "tcp", "hosts", "lone-router", "ray"]
Inject = Callable[[Stage], Awaitable[None]]
Needs = Literal["disk", "trace"]  # a small disk of its own; the right to hold another's thread


@dataclass(frozen=True, slots=True)
class Scenario:
    """`transport`: how KV moves, and on which hosts. `ranks`: of each worker, in `ep` groups of
    experts; above 1 the model is a mixture. `hold_s`: of the fault. `may_cut`: routers that it
    kills. `settle_s`: what it takes longer than others to work off what has waited. `quiet_s`:
    within which no block may be held any more, after the load has ended."""

    name: str
    fault: str
    inject: Inject
    transport: Transport = "memory"
    ranks: int = 1
    ep: int = 1
    redundant: bool = True
    may_cut: tuple[str, ...] = ()
    hold_s: float = 5.0
    deadline_s: float = 30.0
    settle_s: float = 0.0
    quiet_s: float = 10.0
    needs: Needs | None = None

    @property
    def fleet(self) -> str:
        """Name the fleet that the scenario runs on: one serves all scenarios of the same name."""
        if self.ranks == 1:
            return self.transport
        experts = f", {self.ep} groups of experts" if self.ep > 1 else ""
        return f"{self.transport}, {self.ranks} ranks{experts}"


def bound(inject: Callable[..., Awaitable[None]], *arguments: Any) -> Inject:
    """Return a fault with its arguments."""

    async def injected(stage: Stage) -> None:
        await partial(inject, stage, *arguments)()

    return injected
