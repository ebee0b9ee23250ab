"""Deliberate breaks of the controllers' leadership, memory and steps.

A part of mutations.py, which says what they are for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any

from baton.planner.change_history import ChangeHistory
from baton.planner.control import leadership
from baton.planner.control.leadership import RedisLeadership
from baton.planner.control.role_loop import RoleLoop
from baton.planner.control.size_step import StepRun
from baton.planner.control.worker_count import WorkerCount
from baton.runtime.errors import Unavailable
from baton.runtime.worker.order_terms import OrderTerms
from baton.simulation.mutations.patches import Break, always


def _held_for_ever(before: type[RedisLeadership]) -> type[RedisLeadership]:
    class Everlasting(before):  # type: ignore[misc, valid-type]  # mypy takes no base that varies
        term: int

        async def hold(self) -> bool:
            term: int = self.term
            held: bool = await super().hold()
            if term and not held:
                self.term, self._until_s = term, math.inf
            return bool(self.term > 0)

        async def store(self, text: bytes) -> None:
            with contextlib.suppress(Unavailable):  # another one leads
                await super().store(text)

    return Everlasting


def _not_drained(before: Any) -> Any:
    async def call(self: StepRun, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        if name != "the order to drain":
            return await before(self, name, call)
        return None

    return call


def _seen_before(before: Any) -> Any:
    async def unchanged(self: StepRun, seen: WorkerCount) -> Any:
        return seen if self.drained else await before(self, seen)

    return unchanged


def _not_written(_: Any) -> Any:
    async def keep(*_: Any) -> None:
        return None

    return keep


def _none(self: ChangeHistory) -> frozenset[str]:
    return frozenset()


OF_CONTROL: dict[str, Break] = {
    "lead-after-the-lease": Break(
        "a leader whose lease has ended goes on", leadership, "RedisLeadership", _held_for_ever
    ),
    "remove-undrained-workers": Break(
        "a worker is removed before it drains", StepRun, "_call", _not_drained
    ),
    "number-from-before-the-drain": Break(
        "a worker is removed by the number as it was before its drain",
        StepRun,
        "_unchanged",
        _seen_before,
    ),
    "leave-no-memory": Break(
        "a leader's steps are not written for the next one", RoleLoop, "_keep", _not_written
    ),
    "recall-no-memory": Break(
        "a new leader does not know the steps under way", RoleLoop, "_take", always(None)
    ),
    "forget-steps-under-way": Break(
        "a step is over with its order", ChangeHistory, "under_way", lambda _: property(_none)
    ),
    "obey-late-orders": Break(
        "a worker obeys a controller that leads no more", OrderTerms, "check", always(None)
    ),
}
