"""The load that the role controller reads from counters, and its forecast of each ratio."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.planner.change_history import RoleStep
from baton.planner.controller_forecast import forecast, needed_workers
from baton.planner.controller_load import (
    FleetLoad,
    LoadWindow,
    StepSpeed,
    fit_steps,
)
from tests.support.scripted_fleet import (
    CONTEXT,
    GOALS,
    OUTPUT,
    PREFILL_RATE,
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
