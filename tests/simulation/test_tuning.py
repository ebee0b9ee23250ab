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
from baton.simulation.capacity.layout import Layout, Objectives
from baton.simulation.capacity.request_record import RequestRecord
from baton.simulation.capacity.tuning import (
    Search,
    layouts,
    met,
    needed_factor,
    timing_error,
    tune,
    tuning_table,
    verdict,
)

MODEL = TimingModel(
    "test", 1e5, ChunkTiming(0.004, 5e-5), StepTiming(0.008, 1e-4), AttentionTiming(1e-9, 2e-8)
)
FIT = Fit(MODEL, {"chunk": FitError(9, 0.05, 0.2), "step": FitError(9, 0.10, 0.2)})
BASE = Layout(colocated=1, gpus_per_worker=2)
TRACE = draw_trace("requests=150,rate=6,prompt=lognormal:1500:0.8,output=exponential:120")


def quiet(name: str) -> Callable[[int, int], None]:
    return lambda finished, total: None


def search(objectives: Objectives, gpus: int = 8) -> Search:
    return Search(gpus, BASE, objectives, gpu_hour_price=2.0)


def record(ttft_s: float, gap_s: float, refused: str = "") -> RequestRecord:
    end_s = ttft_s + gap_s
    return RequestRecord(TraceRequest(0.0, 10, 2), ttft_s, end_s, end_s, 2, gap_s, 0, refused)


def test_all_ratios_and_colocated_chunks_are_tried() -> None:
    found = layouts(search(Objectives(1.0)))
    ratios = [(each.prefill, each.decode) for each in found if not each.colocated]
    assert ratios == [(1, 3), (2, 2), (3, 1)]
    chunks = [(each.colocated, each.local_chunk_tokens) for each in found if each.colocated]
    assert chunks == [(4, 256), (4, 512), (4, 1024), (4, 2048)]
    assert all(each.workers == 4 for each in found)


def test_many_gpus_are_divided_coarsely() -> None:
    found = [each for each in layouts(search(Objectives(1.0), gpus=4000)) if not each.colocated]
    assert len(found) == 24 and {each.workers for each in found} == {2000}
    assert (found[0].prefill, found[-1].decode) == (1, 1)
    assert len(layouts(search(Objectives(1.0), gpus=2))) == 4  # a single worker is colocated


def test_the_best_layout_comes_first_with_its_range() -> None:
    wanted = search(Objectives(0.5, 0.02))
    found = tune(wanted, FIT, TRACE, quiet)
    shares = [each.report.good_share for each in found]
    assert shares == sorted(shares, reverse=True) and len(found) == 7
    for advice in found[:3]:
        assert advice.low is not None and advice.high is not None
        assert advice.low <= advice.report.good_share <= advice.high
    assert found[3].low is None
    assert met(found, wanted) == (shares[0] >= 0.9)
    assert found[0].report.layout in tuning_table(found, wanted)


def test_an_impossible_objective_names_the_nearest() -> None:
    wanted = search(Objectives(0.010, 0.009))
    found = tune(wanted, FIT, TRACE, quiet)
    assert not met(found, wanted)
    factor = min(each.factor for each in found)
    assert 1 < factor < math.inf
    assert f"ttft={math.ceil(10 * factor - 1e-6)}ms" in verdict(found, wanted)
    nearest = replace(wanted, objectives=Objectives(0.010 * factor, 0.009 * factor))
    assert met(tune(nearest, FIT, TRACE, quiet), nearest)


def test_the_factor_is_that_of_the_wanted_share() -> None:
    records = [record(0.1 * n, 0.01) for n in range(1, 11)]
    assert needed_factor(records, Objectives(0.1), 0.9) == pytest.approx(9)
    assert needed_factor(records, Objectives(10.0, 0.001), 0.5) == pytest.approx(10)
    refused = [record(-1, 0, "Overloaded")] * 2 + records[:8]
    assert math.isinf(needed_factor(refused, Objectives(0.1), 0.9))


def test_a_search_without_objective_or_worker_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no objective"):
        tune(search(Objectives()), FIT, TRACE, quiet)
    with pytest.raises(ConfigError, match="1 GPUs are less than a worker's 2"):
        layouts(search(Objectives(1.0), gpus=1))


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
