"""Steps of running workers as samples: one fit for chunks, decode steps, and both in one."""

from __future__ import annotations

import random

import pytest

from baton.planner.step_samples import StepSample, fit_steps_together, step_sample
from baton.planner.timing_fit import TimingSample
from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    StepTiming,
    StepWork,
    TimingModel,
)
from baton.runtime.errors import ConfigError
from baton.runtime.worker.attention_pairs import causal_pairs

TRUE = TimingModel(
    "true", 100.0, ChunkTiming(0.004, 5e-5), StepTiming(0.008, 2e-4), AttentionTiming(2e-9, 3e-8)
)


def steps(count: int, *, prompts: bool, decodes: bool, noise: float = 0.0) -> list[StepSample]:
    rng, found = random.Random(3), []
    for _ in range(count):
        tokens = rng.randint(16, 2000) if prompts else 0
        start = rng.randint(0, 4000)
        pairs = causal_pairs(start, start + tokens) if tokens else 0
        rows = rng.randint(1, 40) if decodes else 0
        work = StepWork(tokens, pairs, rows, rows * rng.randint(100, 3000))
        found.append(StepSample(work, TRUE.step_s(work) * (1 + rng.uniform(-noise, noise))))
    return found


@pytest.mark.parametrize("together", [False, True])
def test_the_fit_finds_what_made_the_steps(together: bool) -> None:
    """A disaggregated fleet has steps of one kind each, a colocated one has both in one."""
    decode = steps(60, prompts=False, decodes=True)
    fit = fit_steps_together("f", 100.0, decode + steps(60, prompts=True, decodes=together))
    for work in (StepWork(500, causal_pairs(0, 500)), StepWork(0, 0, 12, 9000)):
        assert fit.model.step_s(work) == pytest.approx(TRUE.step_s(work), rel=0.15)
    mixed = StepWork(500, causal_pairs(0, 500), 12, 9000)
    assert fit.model.step_s(mixed) == pytest.approx(TRUE.step_s(mixed), rel=0.02)
    assert fit.errors["step"].median < 0.01 and fit.errors["chunk"].samples == 60


def test_a_larger_fixed_time_of_chunks_is_that_of_mixed_steps() -> None:
    slow = TimingModel("slow", 1.0, ChunkTiming(0.05, 5e-5), StepTiming(0.008, 2e-4))
    made = steps(60, prompts=True, decodes=True) + steps(60, prompts=False, decodes=True)
    fit = fit_steps_together("f", 1.0, [StepSample(s.work, slow.step_s(s.work)) for s in made])
    assert fit.model.chunk.fixed_s == pytest.approx(0.05, rel=0.02)
    assert fit.model.step.fixed_s == pytest.approx(0.008, rel=0.02)


def test_the_fit_is_of_the_mean_where_times_have_a_long_tail() -> None:
    """A third of the steps takes four times as long: queues depend on the mean, twice the usual."""
    rng = random.Random(5)
    usual = steps(400, prompts=False, decodes=True)
    made = [StepSample(s.work, s.seconds * (4 if rng.random() < 1 / 3 else 1)) for s in usual]
    fit = fit_steps_together("f", 1.0, made + steps(20, prompts=True, decodes=False))
    work = StepWork(0, 0, 20, 30_000)
    assert fit.model.step_s(work) == pytest.approx(2 * TRUE.step_s(work), rel=0.15)


def test_one_late_step_does_not_set_the_price_of_a_token() -> None:
    """A prefill worker's first chunk waits for a connection, five times as long as it takes."""
    usual = steps(60, prompts=True, decodes=False)
    first = min(usual, key=lambda each: each.seconds)
    made = [*usual, StepSample(first.work, 5 * first.seconds)]
    model = fit_steps_together("f", 1.0, made + steps(60, prompts=False, decodes=True)).model
    for tokens, most in ((100, 0.15), (500, 0.05), (2000, 0.05)):
        work = StepWork(tokens, causal_pairs(0, tokens))
        assert model.step_s(work) == pytest.approx(TRUE.step_s(work), rel=most)


@pytest.mark.parametrize("together", [False, True])
def test_steps_of_each_kind_take_in_sum_what_was_measured(together: bool) -> None:
    rng = random.Random(7)
    usual = steps(90, prompts=True, decodes=together) + steps(90, prompts=False, decodes=True)
    made = [StepSample(s.work, s.seconds * rng.choice((1, 1, 1, 3))) for s in usual]
    model = fit_steps_together("f", 1.0, made).model
    for half in (made[:90], made[90:]):
        fitted_s = sum(model.step_s(each.work) for each in half)
        assert fitted_s == pytest.approx(sum(each.seconds for each in half), rel=0.01)


def test_a_stall_is_left_out() -> None:
    """The first step of a worker compiles, or waits for its memory."""
    chunks = steps(40, prompts=True, decodes=False)
    stalled = StepSample(chunks[0].work, chunks[0].seconds + 3.0)
    made = [stalled, *chunks[1:], *steps(40, prompts=False, decodes=True)]
    model = fit_steps_together("f", 1.0, made).model
    work = StepWork(100, causal_pairs(0, 100))
    assert model.step_s(work) == pytest.approx(TRUE.step_s(work), rel=0.02)


def test_noise_shows_in_the_error() -> None:
    made = steps(200, prompts=False, decodes=True, noise=0.2)
    fit = fit_steps_together("f", 1.0, made + steps(60, prompts=True, decodes=False))
    assert 0.05 < fit.errors["step"].median < 0.15


def test_transfers_and_host_work_are_fitted_beside() -> None:
    made = steps(20, prompts=False, decodes=True) + steps(20, prompts=True, decodes=False)
    others = [TimingSample("transfer", (float(n),), 0.002 + n * 1e-9) for n in (1e6, 4e6, 9e6)]
    others += [TimingSample("host", (float(n),), 0.003) for n in (10, 500)]
    model = fit_steps_together("f", 1.0, made, others).model
    assert model.transfer_s(2_000_000) == pytest.approx(0.004, rel=0.01)
    assert model.host_s(100) == pytest.approx(0.003, rel=0.01)


@pytest.mark.parametrize(
    ("prompts", "message"), [(False, "computed prompts"), (True, "only decoded")]
)
def test_too_few_steps_are_refused(prompts: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_steps_together("f", 1.0, steps(20, prompts=prompts, decodes=not prompts))


def test_a_row_of_the_log_is_a_sample() -> None:
    sample = step_sample([12, 78, 3, 400, 0.02])
    assert sample == StepSample(StepWork(12, 78, 3, 400), 0.02)
