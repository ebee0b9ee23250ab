"""A speculator between its policy, its proposer and the target's verdict."""

from __future__ import annotations

from typing import Any

import pytest

from baton.decode_worker import speculator as speculator_module
from baton.decode_worker.sequences import Sequence
from baton.decode_worker.speculator import WINDOW_PROPOSALS, AcceptanceWatch, Speculator
from baton.engine.scheduling.batch import Drawn, Slice, StepBatch, StepResult
from baton.runtime import metrics
from baton.simulation.fleet.oracle_proposer import OracleProposer
from tests.support.metric_values import bucket_counts, metric_value
from tests.support.scripted_request import scripted_request

PROMPT = [1, 2, 3]
TEXT = [*PROMPT, *range(10, 40)]


def a_sequence(prompt: list[int] = PROMPT, **fields: Any) -> Sequence:
    sequence = scripted_request(prompt, **fields).sequences[0]
    sequence.output.append(TEXT[len(prompt)])
    sequence.computed = len(prompt)
    sequence.blocks = list(range(20))
    return sequence


def made(share: float = 1.0, longest: int = 4) -> tuple[Speculator, OracleProposer]:
    oracle = OracleProposer(share)
    oracle.texts = [TEXT]
    speculator = Speculator(oracle, longest)
    speculator.observe_step(1, 0.01)  # steps of any size take as long
    speculator.observe_step(64, 0.01)
    return speculator, oracle


def everything(sequence: Sequence, tokens: int) -> int:
    return tokens


def drawn(*tokens: int) -> tuple[Drawn, ...]:
    return tuple(Drawn(0, token) for token in tokens)


def test_nothing_is_proposed_before_a_step_was_measured() -> None:
    oracle = OracleProposer()
    oracle.texts = [TEXT]
    (item,) = Speculator(oracle, 4).slices([a_sequence()], everything)
    assert item.proposed == 0 and len(item.draws) == 1


def test_a_slice_holds_the_known_token_and_the_proposals() -> None:
    speculator, _ = made()
    (item,) = speculator.slices([a_sequence()], everything)
    assert (list(item.tokens), item.start, item.proposed) == ([10, 11, 12, 13, 14], 3, 4)
    assert [draw.position for draw in item.draws] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(("max_tokens", "proposed"), [(1, 0), (2, 0), (3, 1), (4, 2), (50, 4)])
def test_no_more_is_proposed_than_the_request_has_room_for(max_tokens: int, proposed: int) -> None:
    """One token is known, and the last one is drawn and not proposed."""
    speculator, _ = made()
    (item,) = speculator.slices([a_sequence(max_tokens=max_tokens)], everything)
    assert item.proposed == proposed


@pytest.mark.parametrize("blocks_for", [0, 1, 3])
def test_no_more_is_proposed_than_there_are_blocks_for(blocks_for: int) -> None:
    speculator, _ = made()
    (item,) = speculator.slices([a_sequence()], lambda _, tokens: min(tokens, blocks_for))
    assert item.proposed == blocks_for


def test_a_step_has_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator_module, "PROPOSED_ROWS", 7)
    speculator, _ = made()
    items = speculator.slices([a_sequence() for _ in range(3)], everything)
    assert sum(len(item.tokens) for item in items) == 7


def test_the_next_step_waits_only_for_something_to_propose() -> None:
    speculator, oracle = made()
    known, unknown = a_sequence(), a_sequence([1, 2, 9])
    known.under_way = unknown.under_way = 1
    assert speculator.should_wait([known, unknown])
    oracle.texts = []
    other, _ = Speculator(oracle, 4), None
    other.observe_step(1, 0.01)
    assert not other.should_wait([known])


def test_acceptance_ends_at_a_difference_or_with_the_request() -> None:
    speculator, _ = made()
    sequence = a_sequence(stop_token_ids=frozenset({12}))
    (item,) = speculator.slices([sequence], everything)
    run = speculator.judge(sequence, item, drawn(11, 12, 13, 14, 15))
    assert ([each.token for each in run.drawn], run.proposed, run.accepted) == ([11, 12], 4, 2)
    run = speculator.judge(a_sequence(), item, drawn(11, 99))
    assert ([each.token for each in run.drawn], run.proposed, run.accepted) == ([11, 99], 4, 1)
    run = speculator.judge(a_sequence(), item, drawn(11, 12, 13, 14, 15))
    assert (len(run.drawn), run.proposed, run.accepted) == (5, 4, 4)


def test_verdicts_are_counted_by_proposer() -> None:
    speculator, _ = made()
    proposed, accepted = (
        counter.labels("ngram") for counter in (metrics.PROPOSED_TOKENS, metrics.ACCEPTED_TOKENS)
    )
    before = metric_value(proposed), metric_value(accepted)
    sequence = a_sequence()
    (item,) = speculator.slices([sequence], everything)
    speculator.judge(sequence, item, drawn(11, 12, 99))
    assert (metric_value(proposed), metric_value(accepted)) == (before[0] + 4, before[1] + 2)
    assert sequence.proposals is not None
    assert (sequence.proposals.proposed, sequence.proposals.accepted) == (4, 2)


def test_verdicts_are_counted_by_position() -> None:
    """A draft adds one to each bucket from its length on; those above n reached position n + 1."""
    speculator, _ = made()
    found = metrics.PROPOSED_DRAFT_TOKENS, metrics.ACCEPTED_DRAFT_TOKENS
    before = [bucket_counts(each) for each in found]
    sequence = a_sequence()
    (item,) = speculator.slices([sequence], everything)
    speculator.judge(sequence, item, drawn(11, 12, 99))
    bounds = [
        [bound for bound, count in bucket_counts(each).items() if count - olds[bound] == 1]
        for each, olds in zip(found, before, strict=True)
    ]
    assert bounds == [[4], [2]]


def test_a_proposer_that_is_always_wrong_is_asked_less_and_less() -> None:
    speculator, _ = made(share=0.0)
    speculator.observe_step(5, 0.02)
    speculator.observe_step(64, 0.2)
    sequence, proposed = a_sequence(max_tokens=500), 0
    for _ in range(200):
        (item,) = speculator.slices([sequence], everything)
        proposed += item.proposed
        if item.proposed:
            speculator.judge(sequence, item, drawn(TEXT[4]))
    assert proposed < 30


def test_an_ended_sequence_leaves_nothing_with_the_proposer() -> None:
    speculator, oracle = made()
    sequence = a_sequence()
    speculator.slices([sequence], everything)
    assert oracle.open == 1
    for _ in range(2):
        speculator.end(sequence)
    speculator.end(a_sequence())
    assert oracle.open == 0


def test_low_acceptance_is_reported_less_and_less_often() -> None:
    watch = AcceptanceWatch()
    windows = [watch.add(proposed=WINDOW_PROPOSALS, accepted=2) for _ in range(9)]
    assert [share is not None for share in windows] == [False, True, False, True] + [False] * 3 + [
        True,
        False,
    ]
    assert windows[1] == 2 / WINDOW_PROPOSALS


def test_acceptance_that_recovers_is_not_reported() -> None:
    watch = AcceptanceWatch()
    for accepted in (2, 200, 2, 200):
        assert watch.add(proposed=WINDOW_PROPOSALS, accepted=accepted) is None
    assert watch.add(proposed=10, accepted=0) is None


def test_low_acceptance_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    speculator, _ = made(longest=32)
    item = Slice(TEXT[3:36], 3, [0], proposed=32)
    for _ in range(2 * WINDOW_PROPOSALS // 32):
        speculator.judge(a_sequence(), item, drawn(99))
    assert "proposals seldom accepted" in capsys.readouterr().out


def test_a_step_costs_what_passes_between_two_ends() -> None:
    """The device verifies for nothing, but such a step is not planned ahead."""
    speculator, _ = made()
    sequence = a_sequence()
    verifying = StepBatch(speculator.slices([sequence], everything))
    plain = StepBatch([sequence.next_slice()])
    for _ in range(200):
        speculator.observe_result(plain, StepResult((), 0.01, interval_s=0.01), looked=False)
        speculator.observe_result(verifying, StepResult((), 0.01, interval_s=0.06), looked=True)
    assert not speculator.should_wait([sequence])


@pytest.mark.parametrize("interval_s", [None, 0.011])
def test_without_an_interval_the_device_s_time_counts(interval_s: float | None) -> None:
    speculator, _ = made()
    sequence = a_sequence()
    verifying = StepBatch(speculator.slices([sequence], everything))
    plain = StepBatch([sequence.next_slice()])
    for _ in range(200):
        one, other = (StepResult((), time_s, interval_s=interval_s) for time_s in (0.01, 0.011))
        speculator.observe_result(plain, one, looked=False)
        speculator.observe_result(verifying, other, looked=True)
    assert speculator.should_wait([sequence])


def step_results(accepted: int, verified_s: float) -> tuple[StepResult, StepResult]:
    """A plain step of 10 ms, and one whose time of the device is the same."""
    plain = StepResult((drawn(10),), 0.01, interval_s=0.01)
    return plain, StepResult((drawn(*range(accepted + 1)),), 0.01, interval_s=verified_s)


@pytest.mark.parametrize(("verified_s", "waits"), [(0.021, False), (0.019, True)])
def test_measured_yield_decides_whether_to_speculate(verified_s: float, waits: bool) -> None:
    """Half a draft is accepted: the table of costs, which has other steps too, may be wrong."""
    speculator, _ = made(longest=2)
    sequence = a_sequence()
    verifying = StepBatch(speculator.slices([sequence], everything))
    plain = StepBatch([sequence.next_slice()])
    results = step_results(1, verified_s)
    before = metrics.REGISTRY.get_sample_value("baton_speculation_pauses_total")
    for _ in range(20):
        for batch, result in zip((plain, verifying), results, strict=True):
            speculator.observe_result(batch, result, looked=batch is verifying)
        speculator.observe_step(3, 0.01)
    assert speculator.should_wait([sequence]) == waits
    assert (metrics.REGISTRY.get_sample_value("baton_speculation_pauses_total") > before) == (
        not waits
    )


def test_step_after_a_verification_is_no_slow_plain_step() -> None:
    """Neither is planned ahead: the pause between them is the price of speculation."""
    speculator, _ = made(longest=2)
    sequence = a_sequence()
    verifying = StepBatch(speculator.slices([sequence], everything))
    plain = StepBatch([sequence.next_slice()])
    _, verified = step_results(1, 0.03)
    for _ in range(20):
        speculator.observe_result(verifying, verified, looked=True)
        result = StepResult((drawn(10),), 0.01, interval_s=0.02)
        speculator.observe_result(plain, result, looked=False)
    assert not speculator.should_wait([sequence])
