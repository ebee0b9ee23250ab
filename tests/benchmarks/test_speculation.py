"""The speculation benchmark's own parts; its figures are never asserted here."""

from __future__ import annotations

from baton.models.embedded import embedded_model
from benchmarks import speculation
from benchmarks.fleets.fixed_speculators import FixedLengths
from benchmarks.inputs.speculation_workloads import chats
from benchmarks.speculation import DRAFT_TOKENS, TinyTexts, gain


def test_fixed_lengths_leave_room_for_the_end() -> None:
    policy = FixedLengths(DRAFT_TOKENS)
    drafts = [policy.start() for _ in range(3)]
    assert policy.choose(drafts, [9, 2, 0]) == [DRAFT_TOKENS, 2, 0]


def test_answers_are_found_again_behind_their_prompts() -> None:
    asks = [{"prompt": [1], "n": 2}, {"prompt": [2, 3]}]
    answers = [[4], [5], [6, 7]]
    assert speculation.text_answers(asks, answers) == [[1, 4], [1, 5], [2, 3, 6, 7]]
    assert speculation.single_answers(asks, answers) == [[6, 7]]


async def test_only_the_named_parts_are_measured() -> None:
    (figure,) = await speculation.measure(1, ["large_batch"], quick=True)
    assert figure.name == "throughput_ratio_bs64"


async def test_runs_with_and_without_speculation_alternate() -> None:
    texts = TinyTexts()
    assert embedded_model().is_dir()
    asks = [texts.ask(prompt, local=True, max_tokens=4) for prompt in chats(1, 2)]
    proposer = speculation.NgramProposer()
    gained = await gain(asks, lambda: speculation.Speculator(proposer, 2), rounds=1, at_once=2)
    assert gained.tokens_per_s > 0 and gained.tokens_per_processor_s > 0
    assert 0 <= gained.accepted_share <= 1
