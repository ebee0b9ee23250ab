"""Worlds of conversations: history is READ from decode workers, and no fault makes a wrong word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.kv_transfer.conversion import HostConversion
from baton.kv_transfer.memory_mover import MemoryRead
from baton.runtime.grammar.grammar_text import regex_grammar
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import (
    TURNS_EVERY,
    TURNS_SEEDS,
    draw,
)
from baton.simulation.fleet.engine_kind import NARROW, WIDE
from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.lab_vocabulary import END
from baton.simulation.fleet.scenario import Event, Fault, Scenario
from baton.simulation.fleet.world import World

pytestmark = pytest.mark.usefixtures("quiet_logs")

SEEDS = [seed for seed in range(400) if seed % TURNS_EVERY in TURNS_SEEDS]
TURNS_S = (0.1, 1.0, 3.0)
SECOND_S = TURNS_S[1]
LARGE = 16  # tokens of a block, four times the others'
ANSWER_TOKENS = 46  # a READ of so many costs less than to compute them
Reads = list[tuple[float, str]]
GRAMMAR = regex_grammar("[ab]{34,40}(,[a-c]{2,6}){1,3}")


def moments(first: float, *others: float) -> list[object]:
    """When a fault strikes after a turn has begun: the other moments run in `make nightly`."""
    return [first, *(pytest.param(other, marks=pytest.mark.nightly) for other in others)]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """When each READ with checksums began, and its granter's name, in order."""
    found: Reads = []
    created = World.__post_init__

    def watched(world: World) -> None:
        created(world)
        begin = world.exchange.begin

        def noted(read: MemoryRead) -> None:
            if read.attempt.checksummed:
                name = world.of_boot(read.attempt.granter).machine.name
                found.append((world.loop.world_s, name))
            begin(read)

        world.exchange.begin = noted

    monkeypatch.setattr(World, "__post_init__", watched)
    return found


def granters(reads: Reads, from_s: float = 0.0) -> list[str]:
    return [name for at_s, name in reads if at_s >= from_s]


def talks(
    *faults: Event, turns: int = 2, prefill: int = 1, decode: int = 1, grammar: str = "", **how: Any
) -> Scenario:
    """Three chats of `turns` turns, the later ones at TURNS_S; `how` changes the scenario."""
    made = replace(
        draw(SEEDS[0]),
        routers=("r0",),
        prefill={f"p{number}": 160 for number in range(prefill)},
        decode={f"d{number}": 160 for number in range(decode)},
    )
    handoff = replace(made.config.handoff, lease_s=0.5, read_timeout_s=0.3)
    step = replace(made.config.step, chunk_tokens=LARGE, local_prefill_tokens=LARGE)
    router = replace(made.config.router, placement="disaggregated")  # or d0 computes what it lacks
    own = {"step": step} if "sizes" in how else {}
    config = replace(made.config, router=router, handoff=handoff, **own)
    events = list(faults)
    for number in range(3):
        prompt, stops = tuple(range(number, number + 13)), (END,) if grammar else ()
        for turn in range(turns):
            ask = Ask("r0", prompt, ANSWER_TOKENS, stops=stops, deadline_s=20, grammar=grammar)
            events.append(Event(TURNS_S[turn] + (0.01 * number if turn else 0.0), ask))
            prompt = (*prompt, *ask.expected(0), 3, 4, 5)
    plain = {"step_s": 0.003, "delay_s": 0.0005, "read_s": 0.001, "blocks_per_s": None}
    return replace(
        made,
        config=config,
        events=tuple(sorted(events, key=lambda event: event.at_s)),
        **{**plain, "proposer": None, **how},
    )


def two_turns(*faults: Event) -> Scenario:
    """One prefill worker, one decode worker, and three chats of two turns."""
    return talks(*faults)


def test_history_is_read_from_the_decode_worker(reads: Reads) -> None:
    outcome = lab.run(two_turns())
    assert outcome.breaches == [] and outcome.ends == {"finished": 6}
    assert "d0" in granters(reads)


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
@pytest.mark.parametrize("after_s", moments(0.02, 0.0))
def test_no_fault_of_the_granter_costs_an_answer(fault: Fault, after_s: float) -> None:
    outcome = lab.run(two_turns(Event(SECOND_S + after_s, fault)))
    assert outcome.breaches == [] and outcome.ends == {"finished": 6}


@pytest.mark.nightly
def test_worlds_have_turns_reads_and_faults_of_many_kinds(reads: Reads) -> None:
    outcomes = [lab.run(draw(seed)) for seed in SEEDS[:12]]
    assert [outcome.breaches for outcome in outcomes] == [[]] * 12
    assert sum(name.startswith("d") for name in granters(reads)) > 40
    kinds = {fault.does.kind for seed in SEEDS for fault in draw(seed).faults}
    assert kinds >= {"kill", "pause", "reads", "cut", "withhold", "checksums", "drain"}
    assert kinds >= {"rank", "role"}
    assert {draw(seed).proposer for seed in SEEDS} == {None, "oracle", "ngram"}
    assert {draw(seed).ranks for seed in SEEDS} == {1, 2}


SPOKEN: dict[str, Any] = {
    "proposer": "oracle",
    "right_share": 0.7,
    "constrained": True,
    "grammar": GRAMMAR,
}
# The decode workers, of which some fleets have one: larger blocks; KV in fewer bits.
LARGER: dict[str, Any] = {"sizes": {"d0": LARGE, "d1": LARGE}}
NARROWER: dict[str, Any] = {"wide": ("p0", "p1")}
BESIDE: dict[str, dict[str, Any]] = {
    "ranks": {"ranks": 2},
    "an oracle": {"proposer": "oracle", "right_share": 0.5},
    "n-grams": {"proposer": "ngram"},
    "a draft model": {"proposer": "draft"},
    "grammars": {"constrained": True, "grammar": GRAMMAR},
    "all": {"ranks": 2, **SPOKEN},
    "larger blocks, all": {"ranks": 2, **LARGER, **SPOKEN},
    "larger blocks, a draft model": {**LARGER, "proposer": "draft"},
    "fewer bits, all": {"ranks": 2, **NARROWER, **SPOKEN},
}
OF_ALL = ("ranks", "an oracle", "grammars")  # which "all" has together
MOVED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "ranks": {"ranks": 2},
    "larger blocks": LARGER,
    "fewer bits": NARROWER,
}
READ_FAULTS = [Fault("reads", ("d0",), 4.0, what) for what in ("failed", "stuck", "corrupt")]


@pytest.mark.parametrize("beside", BESIDE)
def test_history_is_read_beside(beside: str, reads: Reads) -> None:
    outcome = lab.run(talks(turns=3, **BESIDE[beside]))
    assert outcome.breaches == [] and outcome.ends == {"finished": 9}
    assert "d0" in granters(reads, TURNS_S[2])


@pytest.mark.parametrize("after_s", moments(0.02, 0.0, 0.06))
@pytest.mark.parametrize("fault", [*READ_FAULTS, Fault("kill", ("d0",), 0.4)], ids=str)
@pytest.mark.parametrize(
    "beside",
    [pytest.param(name, marks=pytest.mark.nightly if name in OF_ALL else ()) for name in BESIDE],
)
def test_no_fault_costs_an_answer_beside(beside: str, fault: Fault, after_s: float) -> None:
    outcome = lab.run(talks(Event(SECOND_S + after_s, fault), **BESIDE[beside]))
    assert outcome.breaches == [] and outcome.ends == {"finished": 6}


@pytest.mark.parametrize("after_s", moments(0.01, 0.0, 0.03))
@pytest.mark.parametrize(("what", "for_s"), [("dies", 0.0), ("stops", 6.0), ("stops", 0.4)])
@pytest.mark.parametrize("worker", ["d0", "p0"])
def test_a_lost_rank_of_either_side_costs_no_answer(
    worker: str, what: str, for_s: float, after_s: float
) -> None:
    fault = Event(SECOND_S + after_s, Fault("rank", (worker,), for_s, what))
    outcome = lab.run(talks(fault, ranks=2))
    assert outcome.breaches == [] and outcome.ends == {"finished": 6}


@pytest.mark.parametrize("beside", MOVED)
def test_a_migrated_conversation_reads_from_its_new_worker(beside: str, reads: Reads) -> None:
    """It moves in the midst of its second answer; the third turn needs all of that answer."""
    moved_s = SECOND_S + 0.3
    kill = Event(moved_s, Fault("kill", ("d0",), 8.0))
    outcome = lab.run(talks(kill, turns=3, decode=2, step_s=0.01, **MOVED[beside]))
    assert outcome.breaches == [] and outcome.ends == {"finished": 9}
    assert set(granters(reads, TURNS_S[2])) == {"d1", "p0"}


@pytest.mark.parametrize("after_s", moments(0.02, -0.3, 0.0, 0.06))
@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind, (worker,), 0.1 if kind == "drain" else 1.5)
        for kind in ("drain", "role")
        for worker in ("d0", "p0")
    ],
    ids=str,
)
@pytest.mark.parametrize("beside", MOVED)
def test_workers_that_leave_or_change_cost_no_answer(
    beside: str, fault: Fault, after_s: float
) -> None:
    """A worker that grants history, or reads it, drains or takes on the other role."""
    event = Event(SECOND_S + after_s, fault)
    outcome = lab.run(talks(event, turns=3, prefill=2, decode=2, **MOVED[beside]))
    assert outcome.breaches == [] and outcome.ends == {"finished": 9}


UNLIKE = [seed for seed in range(400) if draw(seed).wide]


@pytest.mark.parametrize("seed", UNLIKE[:3])
def test_unlike_workers_convert_what_stays_exact(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker in eight bits hands its answers back; a wide one keeps nothing of a prompt
    that was in eight bits."""
    scenario = replace(draw(seed), events=tuple(draw(seed).asks))
    made: set[str] = set()
    convert = HostConversion.convert

    def noted(self: HostConversion, *given: Any) -> np.ndarray:
        made.add(self.kv_dtype)
        return convert(self, *given)

    monkeypatch.setattr(HostConversion, "convert", noted)
    outcome = lab.run(scenario)
    assert not outcome.breaches
    wide = {name[0] for name in scenario.wide}
    assert made == ({WIDE, NARROW} if wide == {"p"} else {WIDE})


def test_either_role_is_the_wide_one() -> None:
    roles = {name[0] for seed in UNLIKE for name in draw(seed).wide}
    assert roles == {"p", "d"}
