"""Draft lengths: the optimum, what they learn, and that they stay where nothing changes."""

from __future__ import annotations

import itertools
import random

import pytest

from baton.engine.speculation.draft_length import (
    MAX_PROBE_STEPS,
    PROBE_STEPS,
    PROBED_SEQUENCES,
    SWITCH_MARGIN,
    DraftLengthPolicy,
    SequenceDraft,
)
from baton.engine.speculation.step_costs import FORGET_STEPS, StepCosts

FLAT, STEEP = 0.0, 1.0  # seconds for each row above one, in seconds of a row


def policy_with(growth: float, rows: int = 64, longest: int = 8) -> DraftLengthPolicy:
    policy = DraftLengthPolicy(longest)
    for count in range(1, rows + 1):
        policy.observe_step(count, 1 + growth * (count - 1))
    return policy


def sequence_with(policy: DraftLengthPolicy, accepted: float, steps: int = 200) -> SequenceDraft:
    """One whose proposals are accepted, one by one, with this frequency."""
    sequence = policy.start()
    debt = 0.0
    for _ in range(steps):
        debt += accepted
        policy.record(sequence, 1, int(debt))
        debt -= int(debt)
    return sequence


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_yields_as_much_as_every_other(seed: int) -> None:
    generator = random.Random(seed)
    policy = DraftLengthPolicy(longest=4)
    seconds = 1.0
    for rows in range(1, 16):
        seconds += generator.choice([0.0, 0.01, 0.1, 0.4, 1.0])
        policy.observe_step(rows, seconds)
    if seed % 2:
        policy.observe_draft(3, 1, generator.choice([0.01, 0.1, 0.5]))
    sequences = [sequence_with(policy, generator.random()) for _ in range(3)]
    limits = [generator.randrange(6) for _ in sequences]
    shares = [policy.acceptance(sequence) for sequence in sequences]
    chosen = policy.choose(sequences, limits)
    best = max(
        policy.tokens_per_second(shares, lengths)
        for lengths in itertools.product(*(range(min(limit, 4) + 1) for limit in limits))
    )
    assert policy.tokens_per_second(shares, chosen) == pytest.approx(best, rel=1e-9)
    assert all(length <= limit for length, limit in zip(chosen, limits, strict=True))


def test_free_rows_and_sure_proposals_give_the_longest_draft() -> None:
    policy = policy_with(FLAT)
    assert policy.choose([sequence_with(policy, 1.0)], [100]) == [8]


def test_rows_that_cost_as_much_as_they_yield_give_none() -> None:
    policy = policy_with(STEEP)
    assert policy.choose([sequence_with(policy, 0.9)] * 4, [8] * 4) == [0] * 4


def test_a_better_sequence_gets_the_longer_draft() -> None:
    policy = policy_with(0.2)
    good, bad = sequence_with(policy, 0.95), sequence_with(policy, 0.05)
    longer, shorter = policy.choose([good, bad], [8, 8])
    assert longer > 2
    assert shorter == 0


def test_a_dear_draft_model_shortens_drafts() -> None:
    cheap, dear = policy_with(0.02), policy_with(0.02)
    cheap.observe_draft(1, 4, 0.04)
    dear.observe_draft(1, 4, 1.2)
    (longer,) = cheap.choose([sequence_with(cheap, 0.8)], [8])
    (shorter,) = dear.choose([sequence_with(dear, 0.8)], [8])
    assert longer > shorter > 0


def test_nothing_is_proposed_before_a_step_was_measured() -> None:
    policy = DraftLengthPolicy()
    assert policy.choose([policy.start()], [8]) == [0]
    assert policy.choose([], []) == []
    policy.observe_step(1, 0.01)
    assert policy.choose([policy.start()], [8]) > [0]


def test_lengths_do_not_swing_under_noise() -> None:
    generator = random.Random(7)
    policy = policy_with(0.25)
    sequences = [sequence_with(policy, 0.7) for _ in range(4)]
    changes, before = 0, policy.choose(sequences, [8] * 4)
    for _ in range(500):
        rows = 4 + sum(before)
        policy.observe_step(rows, (1 + 0.25 * (rows - 1)) * generator.uniform(0.95, 1.05))
        lengths = policy.choose(sequences, [8] * 4)
        changes += lengths != before
        before = lengths
    assert changes <= 5


def test_lengths_stay_within_the_margin_of_the_optimum() -> None:
    generator = random.Random(8)
    policy = policy_with(0.1)
    sequences = [policy.start() for _ in range(3)]
    for _ in range(300):
        for sequence in sequences:
            policy.record(sequence, 2, generator.choice([0, 1, 2]))
        lengths = policy.choose(sequences, [8] * 3)
        shares = [policy.acceptance(sequence) for sequence in sequences]
        fresh = policy.choose([SequenceDraft(s.evidence) for s in sequences], [8] * 3)
        best = policy.tokens_per_second(shares, fresh)
        assert policy.tokens_per_second(shares, lengths) * (1 + SWITCH_MARGIN) >= best * (1 - 1e-9)


def test_probes_are_rare_few_and_rarer_while_they_fail() -> None:
    policy = policy_with(STEEP)
    sequences = [policy.start() for _ in range(10)]
    probes = []
    for step in range(3000):
        lengths = policy.choose(sequences, [8] * 10)
        if any(lengths):
            probes.append(step)
            assert sum(lengths) <= PROBED_SEQUENCES
            for sequence, length in zip(sequences, lengths, strict=True):
                policy.record(sequence, length, 0)
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert probes[0] == PROBE_STEPS - 1
    assert gaps == sorted(gaps)
    assert gaps[-1] == MAX_PROBE_STEPS


def test_a_probe_finds_that_speculation_pays_again() -> None:
    policy = policy_with(0.1)
    sequence = sequence_with(policy, 0.0)
    proposed = [policy.choose([sequence], [8])[0]]
    assert proposed == [0]
    for _ in range(1000):
        (length,) = policy.choose([sequence], [8])
        policy.record(sequence, length, length)
        proposed.append(length)
    assert proposed[-1] == 8


def test_a_sequence_at_its_end_gets_no_more_than_its_limit() -> None:
    policy = policy_with(FLAT)
    sequence = sequence_with(policy, 1.0)
    for limit in (8, 3, 0, 2, -1):
        assert policy.choose([sequence], [limit])[0] <= max(limit, 0)


@pytest.mark.parametrize(("proposed", "accepted"), [(2, 3), (0, 1), (2, -1)])
def test_impossible_counts_are_refused(proposed: int, accepted: int) -> None:
    policy = DraftLengthPolicy()
    with pytest.raises(ValueError, match="proposals were accepted"):
        policy.record(policy.start(), proposed, accepted)


def test_costs_never_fall_as_rows_grow() -> None:
    generator = random.Random(4)
    costs = StepCosts()
    for _ in range(400):
        rows = generator.randrange(1, 600)
        costs.observe(rows, 1 + rows * 0.01 * generator.uniform(0.3, 3))
    seconds = costs.seconds(range(1, 2000)).tolist()
    assert seconds == sorted(seconds)


def test_costs_are_interpolated_and_extrapolated() -> None:
    costs = StepCosts()
    costs.observe(4, 1.0)
    assert costs.seconds(8) == pytest.approx(1.5)  # half of it is taken to grow
    costs.observe(8, 2.0)
    assert costs.seconds([1, 4, 6, 8, 12]).tolist() == pytest.approx([1.0, 1.0, 1.5, 2.0, 3.0])


def test_one_slow_step_does_not_bar_its_size_for_ever() -> None:
    costs = StepCosts()
    costs.observe(2, 1.0)
    costs.observe(4, 100.0)
    for _ in range(FORGET_STEPS):
        costs.observe(2, 1.0)
    assert costs.seconds(4) == pytest.approx(1.5)


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (1, 0.0), (1, float("inf"))])
def test_impossible_steps_are_refused(rows: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="a step of"):
        StepCosts().observe(rows, seconds)
