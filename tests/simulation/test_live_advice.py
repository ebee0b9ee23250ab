"""Advice for a running fleet: what is simulated, what is recommended, and when nothing is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.planner.timing_fit import Fit
from baton.planner.timing_model import TimingModel
from baton.planner.traced_requests import traced_requests, traffic_of
from baton.planner.traces import TraceRequest, in_order
from baton.simulation.capacity.advice_text import advice_json, advice_table, findings, ttft_shares
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from baton.simulation.capacity.live_advice import (
    FleetAdvice,
    MeasuredFleet,
    Times,
    advise,
    changes,
    simulated,
)
from tests.support.measured_fleets import FIT, GOALS, LAYOUT, MODEL, QUIET, measured_fleet
from tests.support.traced_records import record, simulated_records

STRICT = Objectives(0.5, 0.012)  # prompts in the steps of a batch would break it
CROWDED = "requests=80,rate=5,prompt=lognormal:1200:0.5,output=constant:100"
PROMPTS = "requests=80,rate=5,prompt=lognormal:1200:0.5,output=constant:20"
ANSWERS = "requests=80,rate=5,prompt=constant:300,output=constant:200"


Advised = tuple[MeasuredFleet, FleetAdvice]


@pytest.fixture(scope="module")
def crowded() -> Advised:
    """A fleet whose prompts wait, and its advice."""
    measured = measured_fleet(CROWDED, goals=STRICT)
    return measured, advise(measured)


@pytest.fixture(scope="module")
def at_ease() -> Advised:
    measured = measured_fleet(QUIET)
    return measured, advise(measured)


def test_prefill_workers_are_wanted_where_prompts_wait(crowded: Advised) -> None:
    _, found = crowded
    assert found.error < 0.05 and found.measured.good_share < 0.8
    assert found.recommended is not None
    assert found.recommended.change.name == "2 prefill, 2 decode"
    assert found.recommended.change.how == "`baton role WORKER prefill` for one worker"
    assert found.recommended.times.good_share > found.now.times.good_share + 0.1
    low, high = found.recommended.low, found.recommended.high
    assert low is not None and high is not None
    assert low <= found.recommended.times.good_share <= high


def test_prompts_are_placed_as_the_routers_place_them(crowded: Advised) -> None:
    """One prefill worker has more prompts than it can compute; three decode workers have room."""
    measured, _ = crowded
    traffic = traffic_of(measured.requests)[:40]
    divided = simulated(replace(measured, placement="disaggregated"), LAYOUT, MODEL, traffic)
    local = simulated(replace(measured, placement="local"), LAYOUT, MODEL, traffic)
    assert divided.ttft_s > 1.5 * local.ttft_s


def test_nothing_is_changed_where_all_is_well(at_ease: Advised) -> None:
    measured, found = at_ease
    assert found.measured.good_share == 1.0 and found.recommended is None
    assert found.growth is None
    assert findings(measured, found)[2].level == "good"
    assert "Change nothing" in findings(measured, found)[2].text


@pytest.mark.nightly
def test_a_wrong_model_recommends_nothing() -> None:
    measured = measured_fleet(PROMPTS)
    found = advise(replace(measured, fit=Fit(MODEL.scaled(2.0), FIT.errors)))
    assert not found.trusted and found.recommended is None
    assert "No recommendation" in findings(measured, found)[2].text


@pytest.mark.nightly
def test_another_worker_is_wanted_where_no_change_suffices() -> None:
    small = replace(LAYOUT, prefill=1, decode=1)
    found = advise(measured_fleet(PROMPTS.replace("rate=5", "rate=4"), small))
    assert found.growth is not None and found.growth.change.layout.prefill == 2
    so_far = found.recommended or found.now
    assert so_far.times.good_share < min(0.9, found.growth.times.good_share - 0.1)


@pytest.mark.nightly
def test_speculation_is_a_guess_that_is_never_recommended() -> None:
    """Nothing measured says how many proposals would be accepted."""
    slow = measured_fleet(QUIET, goals=Objectives(0.5, 0.008))
    found = advise(slow)
    guesses = [each for each in found.alternatives if each.change.kind == "guess"]
    assert guesses[0].times.gap_s < 0.9 * found.now.times.gap_s
    assert found.recommended is None or found.recommended.change.kind != "guess"
    assert "worker.speculate" in findings(slow, found)[3].text
    assert all("speculation" not in each.name for each in changes(replace(slow, speculates=True)))


def test_changes_of_a_colocated_fleet_are_its_ratios_and_sizes() -> None:
    together = replace(LAYOUT, prefill=0, decode=0, colocated=3, local_chunk_tokens=128)
    names = [each.name for each in changes(measured_fleet(QUIET, together))]
    assert names[:3] == ["as it is", "1 prefill, 2 decode", "2 prefill, 1 decode"]
    assert {"chunks of 64 tokens", "chunks of 256 tokens", "batches of 16 at most"} <= set(names)
    assert "4 colocated" in names and "KV in 8 bits, twice the room" in names
    narrow = changes(replace(measured_fleet(QUIET, together), narrow_kv=True))
    assert all("8 bits" not in each.name for each in narrow)


def test_a_chunk_is_at_least_a_block() -> None:
    least = replace(LAYOUT, chunk_tokens=64)
    assert all("chunks of 32" not in each.name for each in changes(measured_fleet(QUIET, least)))


@pytest.mark.nightly
def test_without_objectives_the_time_to_the_end_counts() -> None:
    crowded = replace(LAYOUT, prefill=3, decode=1)
    measured = measured_fleet(ANSWERS, crowded, Objectives())
    found = advise(measured)
    assert found.recommended is not None
    assert found.recommended.times.end_s < 0.9 * found.now.times.end_s
    assert "objective" not in findings(measured, found)[2].text


def test_the_next_change_counts_where_the_best_is_uncertain(
    at_ease: Advised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best change fails where all takes longer; the second gains less, and does not."""
    measured, found = at_ease
    shares = {"as it is": 0.6, "2 prefill, 2 decode": 0.9, "4 colocated": 0.8}

    def scripted(
        fleet: MeasuredFleet, layout: Layout, timing: TimingModel, traffic: list[TraceRequest]
    ) -> Times:
        name = "as it is" if layout == LAYOUT else layout.name
        uncertain = name == "2 prefill, 2 decode" and timing != MODEL
        return replace(found.measured, good_share=0.5 if uncertain else shares.get(name, 0.61))

    monkeypatch.setattr("baton.simulation.capacity.live_advice.simulated", scripted)
    recommended = advise(measured).recommended
    assert recommended is not None and recommended.change.name == "4 colocated"
    shares["4 colocated"] = 0.62  # too little
    assert advise(measured).recommended is None


def test_sentences_name_cause_change_and_error(crowded: Advised) -> None:
    measured, found = crowded
    ttft, itl, advised = findings(measured, found)[:3]
    assert ttft.level == "bad" and "100% the wait for a worker's step" in ttft.text
    assert "objective 500.0 ms" in ttft.text and "sequences in a step" in itl.text
    assert (
        "Make it 2 prefill, 2 decode" in advised.text and "from what was measured" in advised.text
    )
    table = advice_table(measured, found)
    assert (
        "as it is" in table and "measured" in table and "one worker" not in table.split("\n\n")[1]
    )
    shown = advice_json(measured, found, 5.0)
    assert shown["time"] == 5.0 and shown["requests"] == 80
    assert shown["alternatives"][0]["change"] == "as it is"
    best = next(each for each in shown["alternatives"] if each["change"] == "2 prefill, 2 decode")
    assert best["low"] <= best["good_share"] <= best["high"]


def test_shares_of_causes_are_of_all_requests() -> None:
    records = [record(float(n)) for n in range(5)]
    shares = ttft_shares(traced_requests(records))
    assert shares["compute"] == pytest.approx(0.4) and sum(shares.values()) == pytest.approx(1)


@pytest.mark.nightly
def test_each_layout_has_the_cache_hits_of_its_own() -> None:
    """Turns of conversations: the traces name blocks, of which none was cached before."""
    traffic = [
        TraceRequest(
            8.0 * turn + 0.3 * number, 640 * turn + 30, 12, tuple(range(s, s + 10 * turn)), 64
        )
        for number in range(12)
        for turn in range(1, 5)
        for s in [1000 * number]
    ]
    records = simulated_records(CapacityScenario(LAYOUT), MODEL, in_order(traffic))
    measured = MeasuredFleet(LAYOUT, FIT, traced_requests(records), GOALS)
    assert advise(measured).error < 0.01
    unnamed = [{**each, "prompt_blocks": [0, ""]} for each in records]
    counted = replace(measured, requests=traced_requests(unnamed))
    assert advise(counted).error > 0.1  # as if nothing was shared
