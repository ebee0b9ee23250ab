"""The timing model that a router learns: from the prior to the workers' own times."""

from __future__ import annotations

import random

import pytest

from baton.planner.live_timing import (
    CHANGED_STEPS,
    FARTHER,
    FRESH_S,
    PACE_STEP,
    PRIOR,
    PRIOR_KV_BYTES,
    REFIT_S,
    STALL,
    LiveTiming,
    Pace,
    ReadSample,
)
from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    StepTiming,
    StepWork,
    TimingModel,
)
from baton.runtime.worker.attention_pairs import causal_pairs

TRUE = TimingModel(
    "true", 1.0, ChunkTiming(0.04, 1e-3), StepTiming(0.03, 2e-3), AttentionTiming(5e-8, 1e-6)
)


def chunk(tokens: int) -> StepWork:
    return StepWork(tokens, causal_pairs(0, tokens))


def decode(sequences: int, context: int) -> StepWork:
    return StepWork(sequences=sequences, context_tokens=context)


def learned(noise: float, steps: int = 200, scale: float = 1.0) -> LiveTiming:
    dice, timing = random.Random(1), LiveTiming()
    for number in range(steps):
        for work in (
            chunk(dice.randrange(1, 4000)),
            decode(dice.randrange(1, 40), dice.randrange(100, 60_000)),
        ):
            spread = dice.lognormvariate(-(noise**2) / 2, noise) if noise else 1.0
            timing.add_step(work, scale * TRUE.step_s(work) * spread)
        timing.refit(2.0 * number)
    return timing


WORKS = (chunk(100), chunk(1000), chunk(4000), decode(2, 2000), decode(30, 50_000))


def test_prior_holds_while_nothing_is_measured() -> None:
    timing = LiveTiming()
    timing.add_step(StepWork(), 1.0)  # no work
    timing.add_step(chunk(10), 0.0)  # no time
    timing.refit(0.0)
    assert timing.model is PRIOR


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_times_of_any_machine_are_learned(scale: float) -> None:
    timing = learned(0.0, scale=scale)
    for work in WORKS:
        assert timing.model.step_s(work) == pytest.approx(scale * TRUE.step_s(work), rel=0.15)


def test_noise_is_averaged() -> None:
    timing = learned(0.4)
    for work in WORKS:
        assert timing.model.step_s(work) == pytest.approx(TRUE.step_s(work), rel=0.35)


def test_one_kind_of_step_scales_the_other() -> None:
    timing = LiveTiming()
    for tokens in (100, 200, 400) * 4:
        timing.add_step(chunk(tokens), 10 * PRIOR.step_s(chunk(tokens)))
    timing.refit(0.0)
    for work in WORKS:
        assert timing.model.step_s(work) == pytest.approx(10 * PRIOR.step_s(work), rel=0.02)


def test_steps_that_are_all_alike_leave_the_priors_proportions() -> None:
    """A fixed time is not distinguished from one that grows with the tokens."""
    timing = LiveTiming()
    for _ in range(50):
        timing.add_step(chunk(500), 2.0)
    timing.refit(0.0)
    ratio = 2.0 / PRIOR.step_s(chunk(500))
    for tokens in (100, 500, 2000):
        expected = ratio * PRIOR.step_s(chunk(tokens))
        assert timing.model.step_s(chunk(tokens)) == pytest.approx(expected, rel=0.05)


def test_a_changed_machine_is_followed_and_a_stall_is_not() -> None:
    timing = learned(0.0)
    before = timing.model
    for _ in range(CHANGED_STEPS - 1):
        timing.add_step(chunk(1000), 100 * TRUE.step_s(chunk(1000)))
    timing.refit(1e6)
    assert timing.model.step_s(chunk(1000)) == pytest.approx(before.step_s(chunk(1000)), rel=0.02)
    dice = random.Random(2)
    for number in range(400):
        work = chunk(dice.randrange(1, 4000))
        timing.add_step(work, 3 * TRUE.step_s(work))
        timing.refit(2e6 + 2.0 * number)
    assert timing.model.step_s(chunk(1000)) == pytest.approx(3 * TRUE.step_s(chunk(1000)), rel=0.15)


@pytest.mark.parametrize("kinds", ["prompts", "both"])
def test_a_machine_that_stays_slow_is_believed(kinds: str) -> None:
    """Twenty times as slow, as processors held at a lower clock are: no step is a stall then."""
    timing, dice = learned(0.0), random.Random(3)
    decode_scale = 20 if kinds == "both" else 1
    for number in range(3 * CHANGED_STEPS):
        prompt = chunk(dice.randrange(1, 4000))
        timing.add_step(prompt, 20 * TRUE.step_s(prompt))
        batch = decode(dice.randrange(1, 40), dice.randrange(100, 60_000))
        timing.add_step(batch, decode_scale * TRUE.step_s(batch))
        timing.refit(1e6 + 2.0 * number)
    for work, scale in (chunk(1000), 20), (decode(30, 50_000), decode_scale):
        assert timing.model.step_s(work) == pytest.approx(scale * TRUE.step_s(work), rel=0.2)


def test_stalls_between_other_steps_are_never_believed() -> None:
    timing = learned(0.0)
    before = timing.model.step_s(chunk(1000))
    for number in range(4 * CHANGED_STEPS):
        for scale in (100, 1):
            timing.add_step(chunk(1000), scale * TRUE.step_s(chunk(1000)))
        timing.refit(1e6 + 2.0 * number)
    assert timing.model.step_s(chunk(1000)) == pytest.approx(before, rel=0.05)


def test_model_is_fitted_again_for_new_samples_after_a_pause() -> None:
    timing = LiveTiming()
    timing.add_step(chunk(100), 1.0)
    timing.refit(10.0)
    first = timing.model
    timing.refit(20.0)
    assert timing.model is first  # nothing is new
    timing.add_step(chunk(100), 1.0)
    timing.refit(20.5)
    second = timing.model
    assert second is not first
    timing.add_step(chunk(100), 1.0)
    timing.refit(21.0)
    assert timing.model is second


def test_transfers_are_the_medians() -> None:
    timing = LiveTiming()
    for seconds in (0.004, 0.005, 3.0):  # the last one was a first contact
        timing.add_handoff(seconds, 0.0)
    timing.refit(0.0)
    assert timing.model.transfer.fixed_s == 0.005
    assert timing.model.kv_bytes_per_token == PRIOR_KV_BYTES
    timing.add_read(ReadSample(0, 0, 0.1), 1.0)  # nothing was read
    for tokens, seconds in ((100, 0.001), (1000, 0.01), (10, 5.0)):
        timing.add_read(ReadSample(tokens, 2000 * tokens, seconds), 1.0)
    timing.refit(10.0)
    assert timing.model.kv_bytes_per_token == 2000
    assert timing.model.transfer_s(500) == pytest.approx(0.005 + 0.005)


def test_bytes_of_each_distance_have_their_own_median() -> None:
    timing = LiveTiming()
    prior = PRIOR.transfer.per_byte_s
    assert timing.byte_s == tuple(prior * FARTHER**distance for distance in range(5))
    for distance, seconds in ((1, 0.002), (1, 0.004), (1, 0.003), (9, 0.1), (2, 0.001)):
        timing.add_read(ReadSample(10, 1_000_000, seconds, distance), 0.0)
    timing.refit(0.0)
    near = 3e-9 / FARTHER  # a guess from the nearest that was measured
    # never less than nearer ones; a guess; the last one of all that are farther
    assert timing.byte_s == pytest.approx((near, 3e-9, 3e-9, FARTHER * 3e-9, 1e-7))


def test_handoffs_of_long_ago_return_to_the_prior() -> None:
    timing, prior = LiveTiming(), PRIOR.transfer
    for _ in range(20):
        timing.add_handoff(3.0, 0.0)
        timing.add_read(ReadSample(10, 1000, 1.0, 2), 0.0)
    timing.refit(0.0)
    timing.refit(FRESH_S)
    assert timing.model.transfer.fixed_s == 3.0
    timing.refit(3 * FRESH_S)  # a quarter of what they took longer
    assert timing.model.transfer.fixed_s == pytest.approx(0.75 * prior.fixed_s + 0.25 * 3.0)
    assert timing.model.transfer.per_byte_s == pytest.approx(2.5e-4, rel=1e-3)
    assert timing.byte_s[2] == pytest.approx(2.5e-4, rel=1e-3)
    assert timing.model.kv_bytes_per_token == 100  # this does not change
    timing.add_handoff(0.004, 3 * FRESH_S)
    timing.refit(3 * FRESH_S + REFIT_S)
    assert timing.model.transfer.fixed_s == 0.004  # the old ones do not outvote it
    timing.refit(100 * FRESH_S)
    assert timing.model.transfer.fixed_s == pytest.approx(prior.fixed_s)
    assert timing.byte_s == pytest.approx([prior.per_byte_s * FARTHER**d for d in range(5)])


def test_handoffs_alone_tell_nothing_of_steps() -> None:
    timing = LiveTiming()
    timing.add_handoff(3.0, 0.0)
    timing.refit(0.0)
    assert not timing.measured and timing.model.step_s(chunk(500)) == PRIOR.step_s(chunk(500))
    timing.add_step(chunk(500), 1.0)
    timing.refit(REFIT_S)
    assert timing.measured


def test_a_step_much_larger_than_the_last_ones_is_no_stall() -> None:
    """By the prior's proportions 256 tokens take 3 times as long as five: here 40 times."""
    slow = TimingModel("slow", 1.0, ChunkTiming(0.02, 0.015), StepTiming(0.1, 2e-3))
    timing = LiveTiming()
    for _ in range(12):
        timing.add_step(chunk(5), slow.step_s(chunk(5)))
    timing.refit(0.0)
    assert timing.model.step_s(chunk(256)) < slow.step_s(chunk(256)) / STALL
    timing.add_step(chunk(256), slow.step_s(chunk(256)))
    timing.refit(REFIT_S)
    for tokens in (5, 256):
        found = timing.model.step_s(chunk(tokens))
        assert found == pytest.approx(slow.step_s(chunk(tokens)), rel=0.1)


def test_a_pace_has_few_values_and_does_not_flutter() -> None:
    pace, work = Pace(), chunk(1000)
    for _ in range(200):
        pace.add(work, 2.0 * TRUE.step_s(work), TRUE)
    assert pace.factor == PACE_STEP**3  # 1.95
    dice, seen = random.Random(1), set()
    for _ in range(500):
        spread = dice.lognormvariate(0.0, 0.3)
        pace.add(work, 2.0 * TRUE.step_s(work) * spread, TRUE)
        seen.add(pace.value)
    assert seen == {3}
    for _ in range(200):
        pace.add(work, 1e9, TRUE)
        pace.add(work, 0.0, TRUE)  # says nothing
    assert pace.value >= 7
