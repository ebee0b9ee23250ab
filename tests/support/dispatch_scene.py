"""A dispatcher alone, with links that only write down what they are sent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from opentelemetry.context import Context

from baton.proto import worker_pb2
from baton.router.dispatch.active_request import ActiveRequest
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.fleet.circuits import Circuits
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.recent_prompts import RecentPrefills, RecentPrompts
from baton.router.fleet.roster import Roster
from baton.router.fleet.slow_start import SlowStart
from baton.router.fleet.unplaced_requests import UnplacedRequests
from baton.router.fleet.worker_view import KvFormat, WorkerCapacity, WorkerView
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime.config import RouterConfig, StepConfig
from baton.runtime.links import LinkClosed

SCENE = RouterConfig(stream_buffer_messages=16, max_attempts=3)


class FakeLink:
    """`submits` and `cancels` of what it was `sent`."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.boot_id = worker_id.encode()
        self.up = True
        self.hung = False
        self.placed_tokens = self.placed_requests = self.placed_us = 0
        self.load = worker_pb2.Load()
        self.sent: list[worker_pb2.RouterMessage] = []
        self.settled: list[str] = []
        self.confirmed: list[worker_pb2.Resume] = []

    def send(self, message: worker_pb2.RouterMessage) -> None:
        if not self.up:
            raise LinkClosed("down")
        self.sent.append(message)

    def note_draining(self) -> None:
        self.load.draining = True

    def settle(self, request_id: str) -> None:
        self.settled.append(request_id)

    def confirm(self, accepted: worker_pb2.Resume) -> None:
        self.confirmed.append(accepted)

    def submits(self) -> list[worker_pb2.Submit]:
        return [m.submit for m in self.sent if m.WhichOneof("kind") == "submit"]

    def cancels(self) -> list[tuple[str, int]]:
        cancels = [m.cancel for m in self.sent if m.WhichOneof("kind") == "cancel"]
        return [(cancel.request_id, cancel.attempt) for cancel in cancels]


class FakeFleet:
    """Workers, decode workers unless their name says "prefill"; alike but for what a test
    changes."""

    def __init__(self, *names: str) -> None:
        self.links = {name: FakeLink(name) for name in names}
        self.waiting = 0
        self.total_blocks = 100
        self.fingerprints: dict[str, str] = {}  # where they are not "f"
        self.circuits = Circuits(random.Random(1))
        self.recent_prompts = RecentPrompts()
        self.recent_prefills = RecentPrefills()
        self.slow_start = SlowStart()
        self.unplaced = UnplacedRequests()
        self.draws: random.Random | None = None
        self.timelines: list[worker_pb2.Timeline] = []  # that were recorded
        self.expected = 0.0
        self.vocab_size = 1000
        self.matched = 0
        self.known = True  # the index is rebuilt
        self.disconnected: list[WorkerCapacity] = []

    def rebuilt(self) -> bool:
        return self.known

    def disconnected_capacities(self) -> list[WorkerCapacity]:
        return self.disconnected

    def expected_s(self) -> float:
        return self.expected

    def link(self, worker_id: str) -> FakeLink | None:
        return self.links.get(worker_id)

    def record_handoff(
        self, link: FakeLink | None, timeline: worker_pb2.Timeline, granter: bytes
    ) -> None:
        self.timelines.append(timeline)

    def link_of_boot(self, boot_id: bytes) -> FakeLink | None:
        return self.links.get(boot_id.decode())

    def room(self) -> int:
        takes = [e for e in self.links.values() if e.up and not e.load.draining]
        return sum(_role(link) == "decode" for link in takes) * max(0, 512 - self.waiting)

    def holders(
        self, tokens: Sequence[int], salt: bytes, known: object
    ) -> Callable[[KvFormat], Holders]:
        self.matched += 1
        return lambda shape: Holders()  # no worker holds anything

    def roster(self) -> Roster:
        made = Roster()
        for view in self.views():
            made.put(view)
        return made

    def passed_over(self) -> frozenset[bytes]:
        roles = {link.boot_id: _role(link) for link in self.links.values() if link.up}
        return self.circuits.passed_over(roles, asyncio.get_running_loop().time())

    def deferred(self) -> frozenset[bytes]:
        return self.slow_start.deferred(self.roster(), asyncio.get_running_loop().time())

    def views(self) -> list[WorkerView]:
        return [
            WorkerView(
                link.worker_id,
                link.boot_id,
                _role(link),
                "h:1",
                KvFormat(self.fingerprints.get(link.worker_id, "f"), "d", 16),
                total_blocks=self.total_blocks,
                free_blocks=self.total_blocks,
                waiting=self.waiting,
                draining=link.load.draining,
            )
            for link in self.links.values()
            if link.up
        ]


def _role(link: FakeLink) -> str:
    return "prefill" if link.worker_id.startswith("prefill") else "decode"


class DispatchScene:
    """The dispatcher alone, with links that only write down what they are sent."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.fleet = FakeFleet(*(names or ("decode-0",)))
        config = replace(SCENE, **settings)
        self.dispatcher = Dispatcher(cast(Any, self.fleet), config, StepConfig())
        self.dispatcher.place_wait_s = 0.2

    async def start(
        self, request_id: str = "r", within_s: float = 3600, **fields: Any
    ) -> ActiveRequest:
        deadline_s = asyncio.get_running_loop().time() + within_s
        defaults: dict[str, Any] = {"max_tokens": 9, "stop_token_ids": (1,)}
        request = ValidatedRequest(
            prompt=(5, 6, 7), sampling=worker_pb2.Sampling(seed=1), **{**defaults, **fields}
        )
        return await self.dispatcher.start(request, request_id, Context(), deadline_s)

    def link(self, number: int = 0) -> Any:
        return self.fleet.links[f"decode-{number}"]

    def give(self, *outputs: worker_pb2.Output, number: int = 0) -> bool:
        """Whether clients should have a turn then."""
        return self.dispatcher.take(self.link(number), worker_pb2.StepOutputs(outputs=outputs))

    def tell(self, *outputs: worker_pb2.Output, number: int = 0, **asked: Any) -> None:
        """Report the prefill worker that a request asks now; `outputs` travel in the same
        message."""
        word = worker_pb2.PrefillSwitch(**{"request_id": "r", "attempt": 1, **asked})
        message = worker_pb2.StepOutputs(outputs=outputs, prefill_switches=[word])
        self.dispatcher.take(self.link(number), message)

    async def settle_down(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def output(index: int, token: int | None = 9, **fields: Any) -> worker_pb2.Output:
    made = worker_pb2.Output(request_id="r", attempt=1, index=index, token=token)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def failed(code: str, retryable: bool, **fields: Any) -> worker_pb2.Output:
    made = output(0, None, end=worker_pb2.FAILED, **fields)
    made.failure.code, made.failure.retryable = code, retryable
    return made
