"""A fleet over memory links, and the stubs of workers at their far ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from baton.proto import worker_pb2
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.wait_estimator import WaitEstimator
from baton.router.fleet.worker_link import WorkerLink
from baton.router.requests.prompt_limits import ContextLimits
from baton.runtime.config import RouterConfig
from baton.runtime.identity import cluster_key
from baton.runtime.links import LinkClosed, memory_link
from baton.runtime.registry import MemoryRegistry, Role, WorkerRecord
from baton.runtime.registry_client import InlineRegistry
from baton.runtime.wire import ModelLimits
from tests.support.link_scene import FarEnd, NearEnd

KEY = cluster_key("k")
CONFIG = RouterConfig(link_heartbeat_s=0.02, link_silence_s=5.0, link_grace_s=0.05)


class Stub:
    """A worker behind memory links: answers each hello, and keeps the far ends."""

    def __init__(self, name: str, role: Role, number: int, **hello_fields: Any) -> None:
        self.name, self.role, self.boot_id, self.hello_fields = (
            name,
            role,
            bytes([number]) * 16,
            hello_fields,
        )
        self.ends: list[FarEnd] = []
        self.reachable = True
        self.feed: asyncio.Queue[worker_pb2.BlockEvents] = asyncio.Queue(9)

    def connect(self, address: str) -> Stub:
        return self

    def link(self) -> NearEnd:
        if not self.reachable:
            raise LinkClosed("unreachable")
        ends: tuple[NearEnd, FarEnd] = memory_link()
        near, far = ends
        limits = ModelLimits(300, 1000, "f", "d", KEY)
        hello = limits.hello(self.name, self.boot_id, self.role, 4, 9)
        for name, value in self.hello_fields.items():
            setattr(hello, name, value)
        self.ends.append(far)
        self.answer = asyncio.create_task(far.send(worker_pb2.WorkerMessage(hello=hello)))
        return near

    async def watch_blocks(self) -> AsyncIterator[worker_pb2.BlockEvents]:
        while True:
            yield await self.feed.get()

    async def close(self) -> None:
        pass


class Dialer:
    """Finds the stub at an address."""

    def __init__(self) -> None:
        self.stubs: dict[str, Stub] = {}

    def connect(self, address: str) -> Stub:
        return self.stubs[address]


class NoRequests:
    """A LinkListener whose workers come and go, and do nothing else."""

    def __init__(self) -> None:
        self.lost_workers: list[str] = []

    def take(self, link: WorkerLink, outputs: worker_pb2.StepOutputs) -> bool:
        raise AssertionError("no outputs are sent here")

    def pending(self, link: WorkerLink) -> list[worker_pb2.Resume]:
        return []

    def lost(self, link: WorkerLink, request_ids: Iterable[str] | None, reason: str) -> None:
        self.lost_workers.append(link.worker_id)

    def hung(self, link: WorkerLink) -> None:
        raise AssertionError("no worker hangs here")


def wait_estimator(link: WorkerLink) -> WaitEstimator:
    """Return what a link learns of its worker's pace, for tests that report hours in a moment. The
    fleet asks a link for `expected_end` alone."""
    return link._wait_estimator


class FleetScene:
    """The fleet runs from the start; `add` starts a stub and announces it."""

    key, config = KEY, CONFIG

    def __init__(self) -> None:
        self.registry, self.dialer, self.listener = MemoryRegistry(), Dialer(), NoRequests()
        self.begin()

    def begin(self) -> None:
        """Start a fleet that knows no worker yet."""
        self.fleet = Fleet(
            InlineRegistry(self.registry), self.dialer, self.config, KEY, ContextLimits(1000, 300)
        )
        self.task = asyncio.create_task(self.fleet.run(self.listener))

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def put(
        self, address: str, role: Role, number: int, name: str = "", **hello_fields: Any
    ) -> Stub:
        """A stub that the registry does not tell of."""
        stub = self.dialer.stubs[address] = Stub(name or address, role, number, **hello_fields)
        return stub

    def add(self, name: str, number: int = 1, address: str = "", **hello_fields: Any) -> Stub:
        role: Role = "prefill" if name.startswith("prefill") else "decode"
        address = address or name
        stub = self.put(address, role, number, name, **hello_fields)
        self.registry.announce(WorkerRecord(name, stub.boot_id.hex(), role, address, "", "m", 1))
        return stub

    def names(self) -> list[str]:
        return sorted(view.worker_id for view in self.fleet.views())
