"""Fleets of unlike pools: what a small one could never hold is answered by a larger one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.router.fleet import placement
from baton.router.fleet.request_need import Need
from baton.router.fleet.worker_view import WorkerView
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.scenario import BLOCK, Event, Fault, Scenario
from baton.simulation.mutations import patches
from baton.simulation.mutations.patches import Break

pytestmark = pytest.mark.usefixtures("quiet_logs")

SEEDS = range(8)
SMALL, LARGE = 6, 80  # blocks


def unlike(seed: int, *faults: Event) -> Scenario:
    """Half of its requests fit a small pool by their prompts, and not with their output; some
    prompts fit no small prefill worker."""
    made = draw(seed)
    asks = []
    for number in range(6):
        prompt = tuple((seed + 7 * number + index) % 100 for index in range(8 + 6 * (number % 4)))
        ask = Ask(
            router="r0",
            prompt=prompt,
            max_tokens=4 if number % 2 else SMALL * BLOCK,
            choices=1 + number % 2,
            temperature=1.0,
            seed=number,
            deadline_s=20.0,
        )
        asks.append(Event(0.1 + 0.01 * number, ask))
    router = replace(made.config.router, max_requests=64)
    step = replace(made.config.step, max_queue=32)
    return replace(
        made,
        config=replace(made.config, router=router, step=step),
        routers=("r0",),
        prefill={"p0": SMALL, "p1": LARGE},
        decode={"d0": SMALL, "d1": LARGE},
        events=(*asks, *faults),
    )


@pytest.mark.parametrize("lost", [False, True])
def test_every_request_is_answered(lost: bool) -> None:
    """The large decode worker's end too is no reason to call anything too large."""
    faults = [Event(0.2, Fault("kill", ("d1",), 0.5))] if lost else []
    for seed in SEEDS:
        outcome = lab.run(unlike(seed, *faults))
        assert outcome.breaches == []
        assert outcome.ends == {"finished": 6}


def test_a_router_that_counts_prompts_alone_is_seen() -> None:
    def by_prompt(_: object) -> Callable[[Need, WorkerView], bool]:
        return lambda need, worker: need.tokens + 1 <= worker.total_blocks * worker.block_size

    breaking = Break("", placement, "holds", by_prompt)
    outcomes = [lab.run(unlike(seed), lambda: patches.applied(breaking)) for seed in SEEDS]
    assert any(outcome.ends.get("InvalidRequest") for outcome in outcomes)
