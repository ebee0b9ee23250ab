"""Past bugs of the product, by name: each seed is re-run before anything else.

An entry has the seed that shows the bug, and `undo`, which takes its fix out again for the
length of a run: so it is known that the seed would still show it. A scenario is drawn from its
seed; a change of scenario.py makes another one of it, and `baton faults --mutation NAME` finds
a new seed. What broke the product on purpose is in mutations.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.proto import worker_pb2
from baton.router.dispatch import Dispatcher
from baton.router.worker_link import WorkerLink
from baton.simulation.mutations import Break


def _any_role(before: Any) -> Any:
    def welcomed(self: WorkerLink, welcome: worker_pb2.WorkerWelcome) -> None:
        welcome.role = self.record.role
        before(self, welcome)

    return welcomed


def _without_turns(before: Any) -> Any:
    def take(self: Dispatcher, link: WorkerLink, outputs: worker_pb2.StepOutputs) -> bool:
        before(self, link, outputs)
        return False

    return take


@dataclass(frozen=True, slots=True)
class PastBug:
    seed: int
    undo: Break


PAST_BUGS: dict[str, PastBug] = {
    "backlog-of-a-slow-client": PastBug(
        606198,
        Break(
            "a worker that comes back, or a router that was slow, brings more than a client's "
            "buffers hold, and the client, who had no turn to take it, was taken for a slow one",
            Dispatcher,
            "take",
            _without_turns,
        ),
    ),
    "role-of-an-old-record": PastBug(
        234,
        Break(
            "a worker that changed its role was linked again before the registry told of it, and "
            "kept its old role in the router's eyes",
            WorkerLink,
            "_welcomed",
            _any_role,
        ),
    ),
}


def seeds() -> list[int]:
    return [bug.seed for bug in PAST_BUGS.values()]
