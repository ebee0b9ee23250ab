"""A worker that refuses is full, or it is a breach: in the lab's own worlds, at each of their
limits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NoReturn

import pytest

from baton.prefill_worker.scheduler import PrefillScheduler
from baton.router.fleet.worker_link import WorkerLink
from baton.runtime.errors import Overloaded
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.scenario import Event, Scenario
from baton.simulation.mutations import mutations, patches
from baton.simulation.mutations.patches import Break

pytestmark = pytest.mark.usefixtures("quiet_logs")

ASKS = 20


def crowd(**settings: dict[str, int]) -> Scenario:
    """Many requests at once for a small fleet without faults, and settings by section."""
    made = draw(5)
    asks = [Ask("r0", tuple(range(n, n + 18)), max_tokens=12, deadline_s=20.0) for n in range(ASKS)]
    config = replace(
        made.config,
        router=replace(made.config.router, placement="disaggregated", max_requests=64),
        step=replace(made.config.step, max_queue=64),
    )
    for section, values in settings.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return replace(
        made,
        config=config,
        routers=("r0",),
        prefill={"p0": 32},
        decode={"d0": 40, "d1": 40},
        events=tuple(Event(0.1 + n / 1000, ask) for n, ask in enumerate(asks)),
        step_s=0.003,
        delay_s=0.001,
    )


def test_a_crowd_with_room_for_all_is_answered() -> None:
    outcome = lab.run(crowd())
    assert outcome.breaches == [] and outcome.ends == {"finished": ASKS}


@pytest.mark.parametrize(
    "limit", [{"router": {"max_requests": 8}}, {"step": {"max_queue": 2}}], ids=str
)
def test_a_full_worker_may_refuse(limit: dict[str, dict[str, int]]) -> None:
    outcome = lab.run(crowd(**limit))
    assert outcome.breaches == []
    assert outcome.ends["Overloaded"] and outcome.ends["finished"]


@pytest.mark.parametrize(("name", "who"), [("refuse-at-random", "r0"), ("refuse-with-room", "d0")])
def test_a_worker_with_room_may_not_refuse(name: str, who: str) -> None:
    breaches = lab.run(crowd(step={"max_queue": 6}), mutations.named(name)).breaches
    assert any(breach.startswith(f"{who} refuses with room: ") for breach in breaches)


def refusing(owner: type, name: str, words: str) -> Callable[[], AbstractContextManager[None]]:
    def make(before: object) -> Callable[..., NoReturn]:
        def refuse(*_: object) -> NoReturn:
            raise Overloaded(words)

        return refuse

    return lambda: patches.applied(Break("", owner, name, make))


def test_a_prefill_worker_with_room_may_not() -> None:
    refuse = refusing(PrefillScheduler, "submit", "no")
    breaches = lab.run(crowd(), refuse).breaches
    assert "p0 refuses with room: no" in breaches


def test_an_overload_no_worker_reported_is_no_excuse() -> None:
    refuse = refusing(WorkerLink, "send", "not today")
    outcome = lab.run(crowd(), refuse)
    assert outcome.ends == {"Overloaded": ASKS}
    unexplained = [breach for breach in outcome.breaches if "Overloaded: not today" in breach]
    assert len(unexplained) == ASKS + 1  # and the probe
