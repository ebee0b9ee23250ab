"""The fault lab itself: seeds without a breach, the same run again, and eyes that see."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, Counter

from baton.decode_worker.handoffs import Handoffs
from baton.decode_worker.kv_reservations import KvReservations
from baton.decode_worker.requests import Requests
from baton.decode_worker.sequences import Sequence
from baton.engine.scheduling.batch import Drawn
from baton.engine.scheduling.step_pipeline import StepPipeline
from baton.kv_transfer.fetch_ledger import FetchLedger
from baton.simulation import fault_report, lab
from baton.simulation.fleet.draw_scenario import (
    TURNS_EVERY,
    TURNS_SEEDS,
    UNLIKE_EVERY,
    UNLIKE_SEEDS,
    draw,
)
from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.scenario import Event, Fault, Scenario
from tests.support.metric_values import metric_value

pytestmark = pytest.mark.usefixtures("quiet_logs")

SEEDS = 30  # `make nightly` runs seeds up to 2,000, `make faults` 100,000
PART = 125
PARTS = [
    (0, SEEDS),
    *(pytest.param(n, PART, marks=pytest.mark.nightly) for n in range(0, 2000, PART)),
]


@pytest.mark.parametrize(("first", "seeds"), PARTS)
def test_no_seed_breaks_a_promise(first: int, seeds: int) -> None:
    report = fault_report.run(first, seeds, past=False)
    assert report.violations == [] and report.failing_seeds == []
    assert report.seeds == seeds and report.void <= seeds // 8
    assert report.requests > 4 * seeds and report.ends["finished"] > 2 * seeds
    assert report.faults.total() > seeds and report.migrations > seeds // 10


def test_a_seed_is_the_same_run_each_time() -> None:
    for seed in (3, 4):
        traces: list[list[str]] = [[], []]
        outcomes = [lab.run(draw(seed), trace=trace) for trace in traces]
        assert outcomes[0] == outcomes[1]
        assert len(traces[0]) > 200
        assert traces[0] == traces[1]


def test_after_a_run_metrics_count_and_asyncio_lists_tasks_again() -> None:
    counter = Counter("after_a_run", "of this test alone", registry=CollectorRegistry())
    lab.run_seed(1)

    async def main() -> bool:
        task = asyncio.create_task(asyncio.sleep(0))
        return task in asyncio.all_tasks()

    counter.inc(2)
    assert asyncio.run(main())
    assert metric_value(counter) == 2


def test_the_loop_of_a_run_is_running_only_within_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asks = [asyncio.get_running_loop, asyncio.events.get_running_loop]
    found: list[object] = []
    main = lab.Run.main

    async def watched(run: lab.Run) -> None:
        # asyncio's own modules ask by this private name, which the lab replaces too
        own = asyncio.events._get_running_loop()
        found.extend([asyncio.get_running_loop(), own, run.world.loop])
        await main(run)

    monkeypatch.setattr(lab.Run, "main", watched)
    lab.run_seed(3)
    assert found[0] is found[1] is found[2]
    assert [asyncio.get_running_loop, asyncio.events.get_running_loop] == asks
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    assert asyncio.events._get_running_loop() is None  # see above


def test_different_seeds_are_different_scenarios() -> None:
    scenarios = [draw(seed) for seed in range(200)]
    assert draw(7) == draw(7)
    assert {len(s.routers) for s in scenarios} == {1, 2, 3}
    assert {len(s.prefill) for s in scenarios} == {1, 2, 3, 4}
    assert {len(s.decode) for s in scenarios} == {1, 2, 3, 4, 5}
    assert {len(s.faults) for s in scenarios} == {0, 1, 2, 3, 4}  # a conversation may add two
    kinds = {event.does.kind for s in scenarios for event in s.faults}
    assert kinds == {
        "control",
        *("kill", "pause", "slow", "hang", "drain", "role", "cut", "reset", "reads", "step"),
        *("withhold", "checksums", "registry", "rank", "redis"),
    }
    for scenario in scenarios:
        times = [event.at_s for event in scenario.faults]
        usual = not (scenario.constrained or scenario.shared_registry) and scenario.ranks == 1
        talks = (
            scenario.seed % TURNS_EVERY in TURNS_SEEDS
            or scenario.seed % UNLIKE_EVERY in UNLIKE_SEEDS
            or bool(scenario.sizes)
        )
        assert not times or not usual or talks or times[-1] - times[0] <= 0.1
        assert [e.at_s for e in scenario.events] == sorted(e.at_s for e in scenario.events)


def one_fault(fault: Fault, *, seed: int = 5, asks: int = 6) -> Scenario:
    """A small fleet under load, and one fault in its midst."""
    made = replace(draw(seed), routers=("r0",), prefill={"p0": 64}, decode={"d0": 80, "d1": 80})
    router = replace(made.config.router, placement="disaggregated")
    events = [
        Event(0.1 + n / 100, Ask("r0", tuple(range(n, n + 18)), max_tokens=24, deadline_s=20))
        for n in range(asks)
    ]
    events.append(Event(0.16, fault))
    return replace(
        made, config=replace(made.config, router=router), events=tuple(events), step_s=0.003
    )


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", ("d0",), 0.4),
        Fault("kill", ("d1",), 4.0, "silently"),
        Fault("kill", ("p0",), 0.4),
        Fault("role", ("p0",), 1.0),
        Fault("role", ("d0",), 4.0),
        Fault("pause", ("d0",), 4.0),
        Fault("pause", ("p0",), 4.0),
        Fault("cut", ("r0", "d0"), 4.0, "both"),
        Fault("cut", ("d1", "r0"), 4.0, "one way"),
        Fault("cut", ("p0", "d0"), 4.0, "one way"),
        Fault("reset", ("r0", "d0"), 0.0),
        *(Fault("reads", ("p0",), 4.0, what) for what in ("failed", "stuck", "corrupt")),
        *(Fault("reads", ("p0",), 4.0, what) for what in ("short", "wrong", "stale")),
    ],
    ids=str,
)
def test_with_another_worker_there_no_request_fails(fault: Fault) -> None:
    outcome = lab.run(one_fault(fault))
    assert outcome.breaches == []
    assert not outcome.void
    assert outcome.ends == {"finished": 6}


def test_a_run_without_load_before_its_fault_is_void() -> None:
    early = one_fault(Fault("reset", ("r0", "d0"), 0.0))
    early = replace(early, events=(Event(0.05, early.events[-1].does), *early.events[:-1]))
    assert lab.run(early).void
    assert not lab.run(one_fault(Fault("reset", ("r0", "d0"), 0.0))).void
    assert lab.run(one_fault(Fault("reset", ("r0", "d0"), 0.0), asks=2)).void


# -- the lab sees ------------------------------------------------------------------------------


@contextmanager
def replaced(owner: type, name: str, by: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, by)
    yield
    setattr(owner, name, before)


@contextmanager
def trusting() -> Iterator[None]:
    """Whatever lands is taken for good."""
    mismatched = FetchLedger.mismatched
    FetchLedger.mismatched = lambda self, indices, sums: []
    yield
    FetchLedger.mismatched = mismatched


@contextmanager
def repeating() -> Iterator[None]:
    """A worker that says each token twice."""
    accept = Requests.accept

    def twice(self: Requests, sequence: Sequence, drawn: Drawn) -> None:
        accept(self, sequence, drawn)
        accept(self, sequence, drawn)

    Requests.accept = twice
    yield
    Requests.accept = accept


def test_unverified_wrong_bytes_are_a_breach() -> None:
    scenario = one_fault(Fault("reads", ("p0",), 4.0, "corrupt"))
    assert any("tokens" in breach for breach in lab.run(scenario, trusting).breaches)
    assert lab.run(scenario).breaches == []


def test_a_failing_scenario_is_shortened_to_what_it_needs() -> None:
    scenario = one_fault(Fault("reads", ("p0",), 4.0, "wrong"))
    fails = lambda shorter: bool(lab.run(shorter, trusting).breaches)  # noqa: E731
    kept = lab.shrink(scenario, fails)
    assert fails(scenario.only(kept))
    assert len(kept) == 2  # one request and the fault
    assert isinstance(scenario.events[kept[-1]].does, Fault)


def test_a_hung_request_a_leak_and_a_dead_loop_are_breaches() -> None:
    async def swallow(self: object, group: object, on_first: object) -> None:
        await asyncio.Event().wait()

    scenario = one_fault(Fault("reset", ("r0", "d0"), 0.0))
    late = partial(replaced, Handoffs, "fetch", swallow)
    hung = lab.run(scenario, late)
    assert hung.ends == {"DeadlineExceeded": 6} and len(hung.breaches) >= 6
    kept = partial(replaced, KvReservations, "free", lambda self, sequence: None)
    assert any("quiet" in breach for breach in lab.run(scenario, kept).breaches)
    broken = partial(replaced, StepPipeline, "submit", lambda self, plan: 1 / 0)
    assert any("loop has ended" in breach for breach in lab.run(scenario, broken).breaches)


def test_tokens_that_come_twice_are_a_breach() -> None:
    scenario = one_fault(Fault("reset", ("r0", "d0"), 0.0))
    assert lab.run(scenario, repeating).breaches
