"""Past bugs of the product, by name: each seed is re-run before anything else.

An entry has the seed that shows the bug, and `undo`, which takes its fix out again for the
length of a run: so it is known that the seed would still show it. A scenario is drawn from its
seed; a change of draw_scenario.py makes another one of it, and `baton faults --mutation NAME` finds
a new seed. What broke the product on purpose is in mutations.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from baton.decode_worker.handoffs import Handoffs
from baton.kv_transfer.mover import Read
from baton.kv_transfer.reader import HandoffReader
from baton.planner.control import order_rules
from baton.planner.control.order_rules import OrderUnanswered
from baton.proto import worker_pb2
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.dispatch.retry_budget import RetryBudget
from baton.router.fleet.worker_link import WorkerLink
from baton.runtime.errors import ReadFailed, Unavailable
from baton.runtime.registry import WorkerRecord
from baton.simulation.mutations.patches import Break


def _any_role(before: Any) -> Any:
    def accept_hello(self: WorkerLink, hello: worker_pb2.WorkerHello) -> None:
        hello.role = self.record.role
        before(self, hello)

    return accept_hello


def _without_turns(before: Any) -> Any:
    def take(self: Dispatcher, link: WorkerLink, outputs: worker_pb2.StepOutputs) -> bool:
        before(self, link, outputs)
        return False

    return take


def _since_it_was_asked_for(_: Any) -> Any:
    async def landing(self: HandoffReader, read: Read) -> None:
        await asyncio.wait({read.landed}, timeout=self._config.read_timeout_s)
        if not read.landed.done():
            raise ReadFailed("a READ took too long")
        read.landed.result()

    return landing


def _like_others(before: Any) -> Any:
    return lambda self, move, now_s, *, short: before(self, move, now_s)


def _untold(_: Any) -> Any:
    return lambda *_: None


def _taken_for_a_refusal(before: Any) -> Any:
    @contextlib.asynccontextmanager
    async def order_time(worker: WorkerRecord, order: str) -> AsyncIterator[None]:
        try:
            async with before(worker, order):
                yield
        except OrderUnanswered as error:
            raise Unavailable(str(error)) from error

    return order_time


@dataclass(frozen=True, slots=True)
class PastBug:
    seed: int
    undo: Break


PAST_BUGS: dict[str, PastBug] = {
    "backlog-of-a-slow-client": PastBug(
        606198,
        Break(
            "a worker that comes back, or a router that was slow, brings more than a client's "
            "buffers hold, and the client, which had no turn to take it, was judged slow",
            Dispatcher,
            "take",
            _without_turns,
        ),
    ),
    "role-of-an-old-record": PastBug(
        156,
        Break(
            "a worker that changed its role was linked again before the registry showed it, and "
            "kept its old role in the router's eyes",
            WorkerLink,
            "_accept_hello",
            _any_role,
        ),
    ),
    "waiting-is-stuck": PastBug(
        95,
        Break(
            "a READ's time counted from when it was asked for: on a slow link, handoffs failed "
            "that only waited for others",
            HandoffReader,
            "_await_landing",
            _since_it_was_asked_for,
        ),
    ),
    "memory-costs-others": PastBug(
        193,
        Break(
            "a request that fits no worker's memory used up the moves of all others",
            RetryBudget,
            "failed",
            _like_others,
        ),
    ),
    "turn-unseen": PastBug(
        56,
        Break(
            "a router did not know which of its candidates a request asks now, and left it with "
            "the second one, which hung",
            Handoffs,
            "_report_prefill",
            _untold,
        ),
    ),
    "unanswered-order": PastBug(
        40580,
        Break(
            "a controller whose order had no answer asked another worker, and both changed: a role "
            "was left without a worker",
            order_rules,
            "order_time",
            _taken_for_a_refusal,
        ),
    ),
}


def seeds() -> list[int]:
    return [bug.seed for bug in PAST_BUGS.values()]
