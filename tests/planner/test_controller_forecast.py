"""The load that the role controller reads from counters, and its forecast of each ratio."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.planner.change_history import RoleStep
from baton.planner.controller import RoleController
from baton.planner.controller_forecast import (
    NEAR,
    ServiceGoals,
    forecast,
    needed_workers,
    unmet_objectives,
)
from baton.planner.controller_load import (
    FleetLoad,
    FleetSample,
    LoadWindow,
    StepSpeed,
    WorkerSample,
    fit_steps,
)
from baton.planner.step_samples import StepLimits, StepSample
from baton.planner.timing_model import StepWork
from tests.support.scripted_fleet import (
    CONTEXT,
    GOALS,
    OUTPUT,
    PREFILL_RATE,
    SPEED,
    fleet,
)


def test_the_load_is_what_the_counters_say() -> None:
    scripted = fleet(2, 2, rate=10.0)
    window = LoadWindow()
    for _ in range(40):
        window.add(scripted.tick())
    load = window.load()
    assert load.requests_per_s == pytest.approx(10.0, rel=0.05)
    assert load.tokens_per_request == pytest.approx(1000, rel=0.05)
    assert load.output_per_request == pytest.approx(OUTPUT, rel=0.05)
    assert load.context_tokens == pytest.approx(CONTEXT, rel=0.1)
    assert load.prefill_rate == pytest.approx(PREFILL_RATE, rel=0.05)
    assert load.step_s == pytest.approx(0.010 + 0.001 * scripted.batch / 2, rel=0.1)


def test_a_new_boot_counts_from_its_own_zero() -> None:
    scripted = fleet(2, 2, rate=10.0)
    window = LoadWindow()
    for second in range(40):
        window.add(scripted.tick())
        if second == 30:
            scripted.change(RoleStep("d0", "d0.0", "decode"))
            scripted.change(RoleStep("p0", "p0.0", "prefill"))
    assert window.load().requests_per_s == pytest.approx(10.0, rel=0.15)
    assert window.load().prefill_rate == pytest.approx(PREFILL_RATE, rel=0.05)


def test_the_speed_of_steps_is_found_again() -> None:
    truth = StepSpeed(0.012, 3e-4, 2e-8)
    samples = [
        (batch, context, truth.fixed_s + truth.per_sequence_s * batch
         + truth.per_context_token_s * context)
        for batch in (1.0, 4.0, 16.0, 40.0)
        for context in (1e3 * batch, 5e3 * batch)
    ]  # fmt: skip
    found = fit_steps(samples)
    assert found is not None
    assert found.fixed_s == pytest.approx(truth.fixed_s)
    assert found.per_sequence_s == pytest.approx(truth.per_sequence_s)
    assert found.per_context_token_s == pytest.approx(truth.per_context_token_s)
    assert fit_steps(samples[:2]) is None


def with_local_prompts(sample: FleetSample, second: int) -> FleetSample:
    """Return the reports of decode workers that have computed a prompt beside one of their last two
    steps."""
    batch = 1 + second % 8
    plain = StepWork(sequences=batch, context_tokens=CONTEXT * batch * (1 + second % 3))
    mixed = StepWork(prompt_tokens=200, sequences=batch, context_tokens=CONTEXT * batch)
    steps = (
        StepSample(plain, SPEED.fixed_s + SPEED.per_sequence_s * batch),
        StepSample(mixed, 0.4),
    )

    def reported(worker: WorkerSample) -> WorkerSample:
        if worker.role == "prefill":
            return worker
        return replace(worker, prompt_tokens=200 * second, recent_steps=steps)

    return FleetSample(sample.at_s, tuple(reported(each) for each in sample.workers))


def test_steps_are_learned_while_decode_workers_compute_prompts() -> None:
    scripted, window, controller = fleet(2, 2, rate=4.0), LoadWindow(), RoleController(GOALS)
    for second in range(40):
        sample = with_local_prompts(scripted.tick(), second)
        window.add(sample)
        decision = controller.decide(sample, scripted.now_s)
    found = window.load()
    assert found.step is not None
    assert found.step.fixed_s == pytest.approx(SPEED.fixed_s, rel=0.01)
    assert found.step.per_sequence_s == pytest.approx(SPEED.per_sequence_s, rel=0.01)
    assert CONTEXT < found.context_tokens < 3 * CONTEXT
    assert decision.reason == "small_gain"


def test_a_step_of_an_older_report_is_not_learned_again() -> None:
    scripted, window = fleet(2, 2, rate=4.0), LoadWindow()
    steps = with_local_prompts(scripted.tick(), 1).workers[-1].recent_steps
    for second in range(20):
        sample = with_local_prompts(scripted.tick(), second)
        workers = tuple(replace(each, recent_steps=steps) for each in sample.workers)
        window.add(FleetSample(sample.at_s, workers))
    assert window.load().step is None


def test_the_smallest_batch_that_workers_report_counts() -> None:
    scripted, window = fleet(1, 3, rate=4.0), LoadWindow()
    limits = {"p0": 8, "d0": 256, "d1": 128}  # d2 reports none
    for _ in range(3):
        sample = scripted.tick()
        workers = tuple(
            replace(each, step_limits=StepLimits(256, 256, 64, limits[each.worker_id]))
            if each.worker_id in limits
            else each
            for each in sample.workers
        )
        window.add(FleetSample(sample.at_s, workers))
    assert window.load().max_sequences == 128


def test_the_setting_bounds_a_batch_that_no_worker_reports() -> None:
    load, narrow = replace(LOAD, requests_per_s=30.0), replace(GOALS, max_sequences=8)
    own = forecast(load, narrow, 9, 4)
    assert own.served_share < 0.5 < forecast(load, GOALS, 9, 4).served_share
    assert forecast(replace(load, max_sequences=8), GOALS, 9, 4) == own
    assert forecast(replace(load, max_sequences=64), narrow, 9, 4).served_share > 0.5


LOAD = FleetLoad(
    requests_per_s=8.0,
    prompt_tokens_per_s=32_000.0,
    tokens_per_request=4000.0,
    output_per_request=400.0,
    context_tokens=5000.0,
    backlog_tokens=0.0,
    waiting=0,
    running=40,
    kv_tokens=1_000_000,
    max_sequences=None,
    prefill_rate=10_000.0,
    step=StepSpeed(0.010, 0.0004, 2e-8),
    step_s=0.014,
)


def test_more_workers_of_a_role_never_serve_worse() -> None:
    for backlog in (0.0, 50_000.0, 500_000.0):
        load = replace(LOAD, backlog_tokens=backlog)
        ttft = [forecast(load, GOALS, n, 4).ttft_share for n in range(1, 12)]
        assert ttft == sorted(ttft)
        itl = [forecast(load, GOALS, 4, m).itl_share for m in range(1, 12)]
        assert itl == sorted(itl)


def test_a_queue_for_credit_is_seen_as_missing_decode_workers() -> None:
    """Prefill workers have nothing to do: the prompts wait for KV room."""
    load = replace(LOAD, kv_tokens=40_000, waiting=80, backlog_tokens=80 * 4000.0)
    few, many = (forecast(load, GOALS, 6, m) for m in (1, 8))
    assert few.served_share < 0.5 < many.served_share
    assert many.ttft_share > few.ttft_share


def test_saturated_prefill_serves_what_it_computes() -> None:
    found = forecast(LOAD, GOALS, 2, 6)  # 2 * 10,000 of 32,000 tokens a second
    assert found.served_share == pytest.approx(20 / 32)
    assert found.ttft_share < 0.3


def test_wanted_workers_are_the_fewest_that_suffice() -> None:
    wanted = needed_workers(LOAD, GOALS, 0.9, 32)
    for role, count in wanted.items():
        assert 1 < count < 32
        ratio = (count - 1, 32) if role == "prefill" else (32, count - 1)
        found = forecast(LOAD, GOALS, *ratio)
        share = found.ttft_share if role == "prefill" else found.itl_share * found.served_share
        assert share < 0.9


def test_an_objective_that_none_meets_asks_for_what_serves_all() -> None:
    goals = replace(GOALS, ttft_s=0.001, itl_s=0.0001)
    assert unmet_objectives(LOAD, goals, 0.9, 32) == ("prefill", "decode")
    assert needed_workers(LOAD, goals, 0.9, 32) == {"prefill": 4, "decode": 3}  # 3.2 and 2.1
    flood = replace(LOAD, requests_per_s=800.0, prompt_tokens_per_s=3_200_000.0)
    assert needed_workers(flood, goals, 0.9, 32) == {"prefill": 32, "decode": 21}  # of 80 a second


def test_workers_that_hardly_help_are_not_wanted() -> None:
    goals = replace(GOALS, itl_s=0.0115)  # a step takes 10 ms with an empty batch
    best = forecast(LOAD, goals, 32, 32).itl_share
    assert 0.5 < best < 0.9 and unmet_objectives(LOAD, goals, 0.9, 32) == ("decode",)
    wanted = needed_workers(LOAD, goals, 0.9, 32)["decode"]
    shares = [forecast(LOAD, goals, 32, count).itl_share for count in (wanted - 1, wanted)]
    assert shares[0] < best - NEAR <= shares[1] and 1 < wanted < 32


def test_a_queue_alone_makes_no_objective_unmet() -> None:
    """Workers that do not drain it within the horizon shorten it all the same."""
    load = replace(LOAD, backlog_tokens=1e8)
    assert forecast(load, GOALS, 32, 32).ttft_share < 0.1
    assert unmet_objectives(load, GOALS, 0.9, 32) == ()
    assert needed_workers(load, GOALS, 0.9, 32)["prefill"] == 32


def test_the_reason_names_an_objective_that_none_meets() -> None:
    scripted, controller = fleet(2, 2, rate=4.0), RoleController(ServiceGoals(itl_s=0.001))
    for _ in range(20):
        decision = controller.decide(scripted.tick(), scripted.now_s)
    assert decision.reason == "small_gain" and decision.wanted == {"prefill": 1, "decode": 1}
    shortfall = "not even 16 decode workers are predicted to serve 90% of the requests within slo"
    assert decision.shortfall.startswith(shortfall) and decision.shortfall in decision.text
