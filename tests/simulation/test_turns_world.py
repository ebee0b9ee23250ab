"""Worlds of conversations: history is READ from decode workers, and no fault makes a wrong word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import structlog

from baton.kv_transfer.memory_mover import MemoryRead
from baton.runtime import logs
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import TURNS_EVERY, TURNS_SEEDS, draw
from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.scenario import Event, Fault, Scenario
from baton.simulation.fleet.world import World

SEEDS = [seed for seed in range(400) if seed % TURNS_EVERY in TURNS_SEEDS]
SECOND_S = 1.0  # the second turn comes
ANSWER_TOKENS = 36


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    logs.setup("lab", "critical")
    yield
    structlog.reset_defaults()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The granters of all READs with checksums, by name, in order."""
    found: list[str] = []
    created = World.__post_init__

    def watched(world: World) -> None:
        created(world)
        begin = world.exchange.begin

        def noted(read: MemoryRead) -> None:
            if read.attempt.checksummed:
                found.append(world.of_boot(read.attempt.granter).machine.name)
            begin(read)

        world.exchange.begin = noted  # type: ignore[method-assign]

    monkeypatch.setattr(World, "__post_init__", watched)
    return found


def two_turns(*faults: Event) -> Scenario:
    """One prefill worker, one decode worker, and three chats of two turns."""
    made = replace(draw(SEEDS[0]), routers=("r0",), prefill={"p0": 120}, decode={"d0": 120})
    handoff = replace(made.config.handoff, lease_s=0.5, read_timeout_s=0.3)
    events = list(faults)
    for number in range(3):
        first = Ask("r0", tuple(range(number, number + 13)), ANSWER_TOKENS, deadline_s=20)
        second = replace(first, prompt=(*first.prompt, *first.expected(0), 3, 4, 5))
        events += [Event(0.1, first), Event(SECOND_S + 0.01 * number, second)]
    return replace(
        made,
        config=replace(made.config, handoff=handoff),
        events=tuple(sorted(events, key=lambda event: event.at_s)),
        step_s=0.003,
        delay_s=0.0005,
        read_s=0.01,
        blocks_per_s=None,
        proposer=None,
    )


def test_history_is_read_from_the_decode_worker(reads: list[str]) -> None:
    outcome = lab.run(two_turns())
    assert outcome.breaches == [] and outcome.ends == {"finished": 6}
    assert "d0" in reads


STRUCK = [
    Fault("reads", ("d0",), 4.0, what)
    for what in ("failed", "stuck", "corrupt", "short", "wrong", "stale")
]
STRUCK += [
    Fault("kill", ("d0",), 0.4),
    Fault("kill", ("d0",), 0.4, "silently"),
    Fault("pause", ("d0",), 0.3),
    Fault("pause", ("d0",), 2.0),
    Fault("drain", ("d0",), 0.1),
    Fault("cut", ("p0", "d0"), 2.0, "both"),
    Fault("checksums", ("d0",), 4.0),
    *(Fault("withhold", ("d0", "p0"), 25.0, what) for what in ("opened", "held", "offer")),
    Fault("withhold", ("d0", "p0"), 25.0, "acknowledged"),
    Fault("withhold", ("p0", "d0"), 25.0, "closed"),
]


@pytest.mark.parametrize("fault", STRUCK, ids=str)
@pytest.mark.parametrize("after_s", [0.0, 0.02])
def test_no_fault_of_the_granter_costs_an_answer(fault: Fault, after_s: float) -> None:
    outcome = lab.run(two_turns(Event(SECOND_S + after_s, fault)))
    assert outcome.breaches == [] and outcome.ends == {"finished": 6}


def test_worlds_have_turns_reads_and_faults_of_many_kinds(reads: list[str]) -> None:
    outcomes = [lab.run(draw(seed)) for seed in SEEDS[:12]]
    assert [outcome.breaches for outcome in outcomes] == [[]] * 12
    assert sum(name.startswith("d") for name in reads) > 50
    kinds = {fault.does.kind for seed in SEEDS for fault in draw(seed).faults}  # type: ignore[union-attr]
    assert kinds >= {"kill", "pause", "reads", "cut", "withhold", "checksums", "drain"}
