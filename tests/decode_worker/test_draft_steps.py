"""A decode scheduler over a real target and its draft model: tokens, published KV, blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.decode_worker.draft_progress import CATCH_UP_TOKENS, DraftProgress
from baton.engine.scheduling.batch import DraftWork, Slice
from baton.runtime import identity
from tests.support.drafting_worker import KEY, ROOT, DraftingWorker

MODELS = Path(__file__).parents[2] / "models"
TARGET, DRAFT = MODELS / "baton-tiny", MODELS / "baton-tiny-draft"
QUESTIONS = ("How much is 21 + 34?", "Copy this list: pear, apple, plum", "Tell me a story.")


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [f"<|user|>{question}<|end|><|assistant|>" for question in QUESTIONS]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def worker(*, draft: bool, **how: Any) -> DraftingWorker:
    return DraftingWorker(TARGET, DRAFT if draft else None, **how)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return worker(draft=False).serve(prompts(), 40)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_model_changes_no_token_and_is_accepted(
    plain: list[list[int]], ahead: bool
) -> None:
    ours = worker(draft=True, ahead=ahead)
    assert ours.serve(prompts(), 40) == plain
    assert ours.proposed > 10
    assert ours.accepted > 0.4 * ours.proposed


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_are_published_where_nothing_is_proposed(
    plain: list[list[int]], ahead: bool
) -> None:
    ours = worker(draft=True, ahead=ahead, longest=0)
    assert ours.serve(prompts(), 40) == plain
    assert ours.proposed == 0
    size = ours.pool.block_size
    for prompt, output in zip(prompts(), plain, strict=True):
        tokens = [*prompt, *output]
        names = identity.chain(KEY, ROOT, tokens, size)
        behind = len(prompt) + len(output) - CATCH_UP_TOKENS - 2
        assert ours.pool.held_prefix(names) >= behind // size > len(prompt) // size


def test_a_later_request_speculates_from_published_blocks(plain: list[list[int]]) -> None:
    ours = worker(draft=True)
    ours.serve(prompts(), 40)
    before = ours.accepted
    assert ours.serve(prompts(), 40) == plain
    assert ours.accepted > before


def span(start: int, end: int) -> list[int]:
    return list(range(start, end))


def test_draft_work_names_what_is_missing_once() -> None:
    progress = DraftProgress.at(10)
    assert progress.plan(12, 3, span) == DraftWork([10, 11], 3)
    item = Slice([1], 12, (), draft=DraftWork([10, 11], 3))
    progress.commit(item, 14)  # one of three accepted
    assert progress == DraftProgress.at(14)
    assert progress.plan(14, 2, span) == DraftWork([], 2)
    progress.commit(Slice([1], 14, (), draft=DraftWork([], 2)), 17)  # both accepted
    assert progress == DraftProgress.at(16)
    assert progress.plan(17, 1, span) == DraftWork([16], 1)


def test_a_step_without_memory_for_the_draft_leaves_it_behind() -> None:
    progress = DraftProgress.at(10)
    work = progress.plan(12, 3, span)
    progress.commit(Slice([1], 12, (), draft=work), 13, ran=False)
    assert progress == DraftProgress.at(10)


def test_a_step_planned_ahead_does_not_catch_up_twice() -> None:
    progress = DraftProgress.at(10)
    start = 10 + CATCH_UP_TOKENS
    assert not progress.is_behind(start - 1) and progress.is_behind(start)
    work = progress.plan(start, 0, span)
    assert not progress.is_behind(start + 1)
    assert progress.computed == 10  # until the step is over
    progress.commit(Slice([1], start, (), draft=work), start + 1)
    assert progress == DraftProgress.at(start + 1)
