"""The search over layouts: its ranking, its verdict, and the nearest objective."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.planner.timing_fit import Fit, FitError
from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    HostTiming,
    Roofline,
    StepTiming,
    StepWork,
    TimingModel,
    TransferTiming,
)
from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import TraceRequest
from baton.runtime.errors import ConfigError
from baton.runtime.settings.loading import load
from baton.simulation.capacity.layout import Layout, Objectives
from baton.simulation.capacity.request_record import RequestRecord
from baton.simulation.capacity.sensitivity import sensitivities, sensitivity_lines
from baton.simulation.capacity.tuning import (
    AFTERWARDS,
    Advice,
    Search,
    needed_factor,
    timing_error,
    tune,
)
from baton.simulation.capacity.tuning_candidates import (
    Candidate,
    WorkerSize,
    first_candidates,
    neighbours,
)
from baton.simulation.capacity.tuning_report import (
    chart_values,
    configuration,
    how_to_set,
    met,
    tuning_table,
    verdict,
)
from tests.support.chart import PLAIN, merged, render

MODEL = TimingModel(
    "test", 1e5, ChunkTiming(0.004, 5e-5), StepTiming(0.008, 1e-4), AttentionTiming(1e-9, 2e-8)
)
FIT = Fit(MODEL, {"chunk": FitError(9, 0.05, 0.2), "step": FitError(9, 0.10, 0.2)})
BASE = Layout(colocated=1)
SIZES = [WorkerSize(2, FIT, 1 << 20)]
TRACE = draw_trace("requests=60,rate=6,prompt=lognormal:1500:0.8,output=exponential:120")


def quiet(name: str) -> Callable[[int, int], None]:
    return lambda finished, total: None


def search(objectives: Objectives, gpus: int = 8, simulations: int = 24) -> Search:
    return Search(gpus, BASE, objectives, gpu_hour_price=2.0, simulations=simulations)


def candidate(**fields: int) -> Candidate:
    return Candidate(replace(BASE, gpus_per_worker=2, **fields), SIZES[0])


def record(ttft_s: float, gap_s: float, refused: str | None = None) -> RequestRecord:
    end_s = ttft_s + gap_s
    return RequestRecord(TraceRequest(0.0, 10, 2), ttft_s, end_s, end_s, 2, gap_s, 0, refused)


def test_all_ratios_and_colocated_chunks_are_tried_first() -> None:
    found = [each.layout for each in first_candidates(8, BASE, SIZES, 40)]
    ratios = [(each.prefill, each.decode) for each in found if not each.colocated]
    assert ratios == [(1, 3), (2, 2), (3, 1)]
    chunks = [(each.colocated, each.local_chunk_tokens) for each in found if each.colocated]
    assert chunks == [(4, 256), (4, 512), (4, 1024), (4, 2048)]
    assert all(each.workers == 4 for each in found)


def test_many_gpus_are_divided_coarsely() -> None:
    found = [each.layout for each in first_candidates(4000, BASE, SIZES, 1000)]
    ratios = [each for each in found if not each.colocated]
    assert len(ratios) == 24 and {each.workers for each in ratios} == {2000}
    assert (ratios[0].prefill, ratios[-1].decode) == (1, 1)
    assert len(first_candidates(2, BASE, SIZES, 40)) == 4  # a single worker is colocated
    few = [each.layout for each in first_candidates(4000, BASE, SIZES, 5)]
    assert [each.prefill for each in few if each.prefill] == [1000]


@pytest.mark.nightly
def test_each_size_of_a_worker_is_tried() -> None:
    sizes = [*SIZES, WorkerSize(4, FIT, 1 << 22)]
    found = [each.layout for each in first_candidates(8, BASE, sizes, 40)]
    assert {(e.gpus_per_worker, e.pool_tokens, e.workers) for e in found} == {
        (2, 1 << 20, 4), (4, 1 << 22, 2),
    }  # fmt: skip
    slow = replace(FIT, model=MODEL.scaled(9.0))
    best = tune(
        search(Objectives(0.5, 0.02)), [WorkerSize(1, slow, 1 << 20), *SIZES], TRACE, quiet
    )[0]
    assert best.layout.gpus_per_worker == 2  # half as many, each nine times as fast


def test_neighbours_differ_in_one_thing() -> None:
    split = candidate(prefill=2, decode=2, colocated=0)
    names = [name for each in neighbours(split) for name in changed_fields(split, each)]
    assert names == [
        "prefill decode", "prefill decode", "placement", "chunk_tokens", "chunk_tokens",
        "max_sequences", "max_sequences", "local_chunk_tokens", "local_chunk_tokens",
    ]  # fmt: skip
    together = candidate(colocated=4, local_chunk_tokens=128)
    names = [name for each in neighbours(together) for name in changed_fields(together, each)]
    assert names == ["local_chunk_tokens", "max_sequences", "max_sequences"]  # 64 is too few


def changed_fields(one: Candidate, other: Candidate) -> list[str]:
    names = [n for n in Layout.__slots__ if getattr(one.layout, n) != getattr(other.layout, n)]
    return [" ".join(names)] if names else ["placement"] * (one.placement != other.placement)


def test_the_best_comes_first_and_simulations_are_bounded() -> None:
    simulated = list[str]()

    def counted(name: str) -> Callable[[int, int], None]:
        simulated.append(name)
        return quiet(name)

    wanted = search(Objectives(0.5, 0.02))
    found = tune(wanted, SIZES, TRACE, counted)
    assert len(found) <= 24 - AFTERWARDS and len(simulated) <= 24 - 4
    assert [each.rank for each in found[:3]] == sorted(each.rank for each in found)[:3]
    for advice in found[:3]:
        assert advice.low is not None and advice.high is not None
        assert advice.low <= advice.report.good_share <= advice.high
    assert found[3].low is None
    assert met(found, wanted) == (found[0].report.good_share >= 0.9)
    assert found[0].report.layout in tuning_table(found, wanted)


@pytest.mark.nightly
def test_a_batch_limit_that_is_too_low_is_raised() -> None:
    narrow = replace(search(Objectives(1.0, 0.03), 4, 40), base=replace(BASE, max_sequences=4))
    fast = [replace(each, arrived_s=each.arrived_s / 3) for each in TRACE]
    found = tune(narrow, SIZES, fast, quiet)
    assert found[0].layout.max_sequences > 4
    first = max(e.report.good_share for e in found if e.layout.max_sequences == 4)
    assert found[0].report.good_share > first + 0.1


def test_what_to_set_is_valid_for_settings_and_chart() -> None:
    split = candidate(prefill=3, decode=1, colocated=0, chunk_tokens=4096)
    wanted = search(Objectives(0.5, 0.04))
    settings = configuration(split, wanted)
    flags = {name: str(value) for each in settings.values() for name, value in each.items()}
    config = load(None, {}, flags)
    assert (config.step.chunk_tokens, config.step.prefill_tokens) == (4096, 4096)
    assert config.router.placement == "auto" and config.worker.tp == 2
    assert config.slo.itl_s == 0.04  # as placement was simulated
    assert "slo.itl_s" not in configuration(split, search(Objectives(0.5)))["router"]
    values = chart_values(split, wanted)
    prefill = values["prefill"]
    assert (prefill["replicas"], prefill["tp"], prefill["gpu"]) == (3, 2, {"count": 2})
    pool = render(merged(PLAIN, values)).named("StatefulSet", "prefill")
    (worker,) = pool["spec"]["template"]["spec"]["containers"]
    assert pool["spec"]["replicas"] == 3
    assert {"--set=worker.tp=2", "--set=step.chunk_tokens=4096"} <= set(worker["args"])
    assert "--prefill 3 --decode 1 --set router.placement=auto" in how_to_set(split, wanted)[0]
    together = candidate(colocated=4)
    assert chart_values(together, wanted) == {}
    assert "placement=local --set slo.itl_s=0.04" in how_to_set(together, wanted)[0]


def test_an_impossible_objective_names_the_nearest() -> None:
    wanted = search(Objectives(0.010, 0.009))
    found = tune(wanted, SIZES, TRACE, quiet)
    assert not met(found, wanted)
    factor = min(each.factor for each in found)
    assert 1 < factor < math.inf
    assert f"ttft={math.ceil(10 * factor - 1e-6)}ms" in verdict(found, wanted)
    other = replace(found[-1], factor=factor / 2)  # fewer meet them, and it is nearer
    shown = tuning_table([found[0], other], wanted)
    assert how_to_set(other.candidate, wanted)[0] in shown
    assert how_to_set(found[0].candidate, wanted)[0] not in shown
    nearest = replace(wanted, objectives=Objectives(0.010 * factor, 0.009 * factor))
    assert met(tune(nearest, SIZES, TRACE, quiet), nearest)


def test_the_factor_is_that_of_the_wanted_share() -> None:
    records = [record(0.1 * n, 0.01) for n in range(1, 11)]
    assert needed_factor(records, Objectives(0.1), 0.9) == pytest.approx(9)
    assert needed_factor(records, Objectives(10.0, 0.001), 0.5) == pytest.approx(10)
    refused = [record(-1, 0, "Overloaded")] * 2 + records[:8]
    assert math.isinf(needed_factor(refused, Objectives(0.1), 0.9))


def test_a_search_without_objective_or_worker_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no objective"):
        tune(search(Objectives()), SIZES, TRACE, quiet)
    with pytest.raises(ConfigError, match="1 GPUs are less than a worker's 2"):
        tune(search(Objectives(1.0), gpus=1), SIZES, TRACE, quiet)


def test_a_search_that_cannot_try_each_size_is_refused() -> None:
    """Three sizes have five first candidates each, and of 24 simulations 14 are for candidates."""
    sizes = [WorkerSize(gpus, FIT, 1 << 20) for gpus in (1, 2, 4)]
    few = search(Objectives(0.5, 0.02))
    with pytest.raises(ConfigError, match="--simulations 24 is too few .*: give 25 or more"):
        tune(few, sizes, TRACE[:2], quiet)
    found = tune(replace(few, simulations=25), sizes, TRACE[:2], quiet)
    assert {each.layout.gpus_per_worker for each in found} == {1, 2, 4}
    assert "worker with 4 GPUs: 1048576 tokens of KV" in tuning_table(found, few)


def test_the_error_of_the_model_is_the_larger_median() -> None:
    assert timing_error(FIT.errors) == 0.10 and timing_error({}) == 0.0


def test_a_scaled_model_takes_longer_for_all_work() -> None:
    full = replace(
        MODEL,
        transfer=TransferTiming(0.001, 1e-9),
        host=HostTiming(0.002, 1e-6),
        roofline=Roofline(1e12, 1.0, 1e9, 1e12, 1e9),
    )
    slow = full.scaled(1.5)
    for work in (StepWork(100, 5050, 0, 0), StepWork(0, 0, 4, 1000), StepWork(10, 55, 1, 9)):
        for one, other in ((MODEL, MODEL.scaled(1.5)), (full, slow)):
            assert other.step_s(work) == pytest.approx(1.5 * one.step_s(work))
    assert slow.transfer_s(10) == pytest.approx(1.5 * full.transfer_s(10))
    assert slow.host_s(10) == pytest.approx(1.5 * full.host_s(10))


@pytest.mark.nightly
def test_one_worker_more_and_other_traffic_are_simulated() -> None:
    """With a scarce role, one worker more of it gains, and more traffic loses."""
    objectives = search(Objectives(0.6, 0.05))
    fast = [replace(each, arrived_s=each.arrived_s / 4) for each in TRACE]
    found = tune(objectives, SIZES, fast, quiet)
    scarce = next(each for each in found if (each.layout.prefill, each.layout.decode) == (1, 3))
    changes = {each.change: each for each in sensitivities(objectives, scarce, fast, quiet)}
    assert list(changes) == [
        "one prefill worker more", "one decode worker more", "-20% traffic", "+20% traffic",
    ]  # fmt: skip
    assert changes["one prefill worker more"].good_share > scarce.report.good_share
    more = tune_one(objectives, replace(scarce.layout, prefill=2), fast)
    assert changes["one prefill worker more"].goodput_per_s == more.report.goodput_per_s
    relative = more.report.goodput_per_s / scarce.report.goodput_per_s - 1
    assert changes["one prefill worker more"].goodput_change == pytest.approx(relative)
    assert changes["-20% traffic"].good_share > changes["+20% traffic"].good_share
    lines = sensitivity_lines(list(changes.values()), scarce)
    assert lines[0].startswith("1 prefill, 3 decode, and") and len(lines) == 5


def tune_one(objectives: Search, layout: Layout, trace: list[TraceRequest]) -> Advice:
    """Simulate one layout, as a search does."""
    more = replace(objectives, gpus=layout.workers * layout.gpus_per_worker)
    return next(each for each in tune(more, SIZES, trace, quiet) if each.layout == layout)


def test_colocated_workers_have_one_role_to_add() -> None:
    objectives = search(Objectives(5.0, 0.2), gpus=2)
    (best, *_) = tune(objectives, SIZES, TRACE[:30], quiet)
    assert best.layout.colocated == 1
    names = [each.change for each in sensitivities(objectives, best, TRACE[:30], quiet)]
    assert names == ["one colocated worker more", "-20% traffic", "+20% traffic"]
