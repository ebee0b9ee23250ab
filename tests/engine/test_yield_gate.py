"""Speculation stops where its measured yield is lower, under noise too, and is tried again."""

from __future__ import annotations

import math
import random

import pytest

from baton.engine.speculation.draft_length import DraftLengthPolicy
from baton.engine.speculation.yield_gate import (
    CLOSED_STEPS,
    MAX_CLOSED_STEPS,
    PLAIN_STEPS,
    REFRESH_STEPS,
    TRIAL_STEPS,
    YieldGate,
)

SEQUENCES = 8


def plain(gate: YieldGate, steps: int = 1, sequences: int = SEQUENCES) -> None:
    for _ in range(steps):
        gate.observe(sequences, sequences, 1.0, looked=False)


def speculate(gate: YieldGate, steps: int, gain: float, sequences: int = SEQUENCES) -> int:
    """Take steps with proposals while the gate is open. Return how many."""
    for step in range(steps):
        if not gate.open(sequences):
            return step
        gate.observe(sequences, round(10 * sequences * gain), 10.0, looked=True)
    return steps


def plain_until_open(gate: YieldGate, limit: int = 2 * MAX_CLOSED_STEPS) -> int:
    for step in range(limit):
        if gate.open(SEQUENCES):
            return step
        plain(gate)
    return limit


def test_lower_yield_closes_and_each_failed_trial_waits_longer() -> None:
    gate = YieldGate()
    plain(gate, PLAIN_STEPS)
    closed = []
    for _ in range(8):
        assert speculate(gate, 100, 0.9) == TRIAL_STEPS
        closed.append(plain_until_open(gate))
    assert closed == [min(CLOSED_STEPS << n, MAX_CLOSED_STEPS) for n in range(8)]


def test_higher_yield_stays_open_but_for_a_plain_step() -> None:
    gate = YieldGate()
    plain(gate, PLAIN_STEPS)
    for _ in range(3):
        assert speculate(gate, 1000, 1.1) == REFRESH_STEPS
        plain(gate)


def test_trial_that_succeeds_shortens_the_next_wait() -> None:
    gate = YieldGate()
    plain(gate, PLAIN_STEPS)
    for _ in range(3):
        speculate(gate, 100, 0.9)
        plain_until_open(gate)
    assert speculate(gate, CLOSED_STEPS, 1.2) == CLOSED_STEPS
    speculate(gate, 1000, 0.5)
    assert plain_until_open(gate) == CLOSED_STEPS


def test_plain_steps_are_measured_before_a_trial_is_judged() -> None:
    gate = YieldGate()
    assert speculate(gate, 100, 0.9) == TRIAL_STEPS
    assert plain_until_open(gate) == PLAIN_STEPS + CLOSED_STEPS


def test_batches_of_other_sizes_are_judged_apart() -> None:
    gate = YieldGate()
    plain(gate, PLAIN_STEPS)
    plain(gate, PLAIN_STEPS, sequences=1)
    assert speculate(gate, 100, 0.9) == TRIAL_STEPS
    assert not gate.open(SEQUENCES) and gate.open(1)
    assert speculate(gate, 100, 1.5, sequences=1) == 100


def throughput(
    seed: int, sequences: int, shares: list[float], *, noise: float, steps: int = 400
) -> float:
    """Tokens a second of a steady batch, over plain decoding: a step takes 5 ms and 0.3 ms a row,
    or 1.5 ms more where it verifies; what is measured of that is noisy."""
    dice = random.Random(seed)
    policy = DraftLengthPolicy(4)
    live = [(policy.start(), dice.choice(shares)) for _ in range(sequences)]
    tokens = total_s = 0.0
    for _ in range(steps):
        lengths = policy.choose([sequence for sequence, _ in live], [8] * sequences)
        step_s = (5 + 0.3 * (sequences + sum(lengths)) + 1.5 * any(lengths)) / 1e3
        made = sequences
        for (sequence, share), length in zip(live, lengths, strict=True):
            accepted = next((n for n in range(length) if dice.random() >= share), length)
            policy.record(sequence, length, accepted)
            made += accepted
        tokens, total_s = tokens + made, total_s + step_s
        seen_s = step_s * math.exp(dice.gauss(0, noise))
        policy.observe_step(sequences + sum(lengths), seen_s)
        policy.observe_yield(sequences, made, seen_s, looked=any(lengths))
        live = [
            (policy.start(), dice.choice(shares)) if dice.random() < 0.03 else each for each in live
        ]
    return tokens / total_s / (sequences / ((5 + 0.3 * sequences) / 1e3))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("noise", [0.0, 0.25])
def test_large_batch_keeps_its_speed_where_speculation_costs(seed: int, noise: float) -> None:
    """Without the gate noise takes it to 0.66."""
    assert throughput(seed, 64, [0.2, 0.3, 0.3, 0.3], noise=noise) >= 0.98


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("noise", [0.0, 0.25])
def test_lone_sequence_keeps_its_gain_under_noise(seed: int, noise: float) -> None:
    assert throughput(seed, 1, [0.9], noise=noise) >= 2.0
