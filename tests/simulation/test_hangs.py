"""Requests that turn to a prefill worker that hangs leave it in time; one that waits is seen."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from baton.decode_worker.handoffs import Handoffs
from baton.decode_worker.sequences import Group
from baton.proto import worker_pb2
from baton.router.dispatch.attempt import Attempt
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.fleet.worker_link import WorkerLink
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import HANG_EVERY, HANG_S, HANG_SEED, draw
from baton.simulation.fleet.scenario import Fault
from baton.simulation.fleet.world import DRIFT
from baton.simulation.mutations import patches
from baton.simulation.mutations.patches import Break
from baton.simulation.mutations.regressions import PAST_BUGS
from baton.simulation.virtual.virtual_loop import VirtualLoop

pytestmark = pytest.mark.usefixtures("quiet_logs")

HANGING = range(HANG_SEED, 10 * HANG_EVERY, HANG_EVERY)
BOUND_S = 3.0  # from the beginning of the hang; docs/reliability/promises.md


def faults(seed: int) -> list[Fault]:
    return [event.does for event in draw(seed).faults if isinstance(event.does, Fault)]


def test_in_some_seeds_a_prefill_worker_hangs_as_another_fails() -> None:
    long = [seed for seed in range(200) if any(f.for_s == HANG_S for f in faults(seed))]
    assert long == list(range(HANG_SEED, 200, HANG_EVERY))
    for seed in HANGING:
        assert draw(seed) == draw(seed)
        hang, other = sorted(faults(seed), key=lambda fault: fault.for_s, reverse=True)
        assert hang.kind == "hang" and other.kind in ("kill", "reads", "step")
        assert hang.targets != other.targets
        assert {*hang.targets, *other.targets} <= set(draw(seed).prefill)


def test_requests_leave_a_hung_worker_within_three_seconds() -> None:
    """By the world's clock; a worker's own one differs by the drift at most."""
    chosen: Counter[int] = Counter()
    waits_s: list[float] = []  # an exception in here would be one candidate's failure

    def timed(before: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def attempt(
            self: Handoffs, group: Group, candidate: worker_pb2.Candidate, on_first: object
        ) -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            asked_s = loop.world_s
            try:
                await before(self, group, candidate, on_first)
            finally:
                waited_s = loop.world_s - max(asked_s, hang.at_s)
                if candidate.worker_id in hang.does.targets and waited_s > 1:
                    waits_s.append(waited_s)
                    chosen[list(group.request.candidates).index(candidate)] += 1

        return attempt

    watching = Break("", Handoffs, "_try", timed)
    for seed in HANGING:
        waits_s.clear()
        (hang,) = (e for e in draw(seed).faults if str(e.does).startswith("hang"))
        outcome = lab.run(draw(seed), lambda: patches.applied(watching))
        assert outcome.breaches == [] and not outcome.void
        assert outcome.ends == {"finished": outcome.requests}
        late = [waited_s for waited_s in waits_s if waited_s >= BOUND_S * (1 + DRIFT)]
        assert late == [], seed
    assert chosen[0] > 3 and chosen[1] > 3


def _in_vain(before: Callable[..., None]) -> Callable[..., None]:
    def left(self: Dispatcher, submission: Attempt, link: WorkerLink) -> None:
        if submission.link is link:
            before(self, submission, link)

    return left


@pytest.mark.parametrize(
    "broken",
    [
        PAST_BUGS["turn-unseen"].undo,
        Break(
            "what is told is not acted on", Dispatcher, "_switch_prefill", lambda _: lambda *_: None
        ),
        Break("hung prefill workers are not left", Dispatcher, "_leave_hung", _in_vain),
    ],
    ids=lambda broken: broken.name,
)
def test_a_request_that_waits_for_it_is_seen(broken: Break) -> None:
    breaches = [
        breach
        for seed in HANGING[3:8]
        for breach in lab.run(draw(seed), lambda: patches.applied(broken)).breaches
    ]
    assert any("which is known to hang" in breach for breach in breaches)
