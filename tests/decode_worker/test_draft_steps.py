"""A decode scheduler over a real target and its draft model: tokens, published KV, blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.decode_worker.draft_progress import CATCH_UP_TOKENS, DraftProgress
from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Request
from baton.decode_worker.speculator import Speculator
from baton.decode_worker.step_plan import StepPlan
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import DraftWork, Slice
from baton.engine.scheduling.blocks import BlockPool
from baton.runtime import identity
from baton.runtime.config import StepConfig
from tests.support.scripted_request import scripted_request

MODELS = Path(__file__).parents[2] / "models"
TARGET, DRAFT = MODELS / "baton-tiny", MODELS / "baton-tiny-draft"
BLOCKS = 96
KEY = b"key"
ROOT = identity.root(KEY, "model", "float32")
QUESTIONS = ("How much is 21 + 34?", "Copy this list: pear, apple, plum", "Tell me a story.")


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [f"<|user|>{question}<|end|><|assistant|>" for question in QUESTIONS]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


class Worker:
    """Steps of a scheduler on a runner, one planned ahead where `ahead`."""

    def __init__(self, *, draft: bool, ahead: bool = False, longest: int = 4) -> None:
        options = EngineOptions(
            blocks=BLOCKS,
            dtype="float32",
            backend="torch",
            draft_folder=DRAFT if draft else None,
        )
        self.runner: ModelRunner = build_runner(TARGET, options)
        self.runner.pool.tensor.fill_(math.nan)
        if self.runner.pool.draft is not None:
            self.runner.pool.draft.tensor.fill_(math.nan)
        self.pool = BlockPool(BLOCKS, self.runner.pool.block_size)
        self.speculator = Speculator(None, longest) if draft else None
        config = StepConfig(local_prefill_tokens=32, max_sequences=8)
        self.scheduler = DecodeScheduler(self.pool, config, KEY, speculator=self.speculator)
        self.ahead = ahead
        self.accepted = self.proposed = 0

    def serve(self, texts: list[list[int]], max_tokens: int) -> list[list[int]]:
        requests: list[Request] = []
        for at_s, prompt in enumerate(texts):
            request = scripted_request(
                prompt, at_s=float(at_s), max_tokens=max_tokens, local=True, root=ROOT
            )
            self.scheduler.submit(request)
            requests.append(request)
        plans: list[StepPlan] = []
        results = self.results(plans)
        while any(not request.ended for request in requests):
            self.scheduler.admit()
            while len(plans) < 1 + self.ahead and (plan := self.scheduler.plan()):
                plans.append(plan)
            next(results)
            self.check_published()
        self.pool.check()
        return [request.sequences[0].output for request in requests]

    def results(self, plans: list[StepPlan]) -> Iterator[None]:
        while True:
            plan = plans[0]
            result = self.runner.run(plan.batch)
            # Fixed times, so that draft lengths do not depend on how busy the machine is.
            result = replace(result, device_s=0.01, draft_s=0.001 if result.draft_s else 0.0)
            assert not result.broken and not result.failed
            plans.pop(0)
            outcome = self.scheduler.commit(plan, result)
            for sequence, token in outcome.drawn:
                self.take(sequence, [token.token])
            for run in outcome.runs:
                self.accepted, self.proposed = (
                    self.accepted + run.accepted,
                    self.proposed + run.proposed,
                )
                self.take(run.sequence, [each.token for each in run.drawn])
            yield

    def take(self, sequence, tokens: list[int]) -> None:
        if sequence.ended:
            return
        sequence.output += tokens
        assert len(sequence.output) <= sequence.request.max_tokens
        if len(sequence.output) == sequence.request.max_tokens:
            self.scheduler.end(sequence)

    def check_published(self) -> None:
        """What another request may match holds the KV of both models."""
        pool = self.runner.pool
        for block in range(BLOCKS):
            if self.pool.identity_of(block) is None:
                continue
            assert pool.tensor[block].isfinite().all()
            assert pool.draft is None or pool.draft.tensor[block].isfinite().all(), block


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return Worker(draft=False).serve(prompts(), 40)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_model_changes_no_token_and_is_accepted(
    plain: list[list[int]], ahead: bool
) -> None:
    worker = Worker(draft=True, ahead=ahead)
    assert worker.serve(prompts(), 40) == plain
    assert worker.proposed > 10
    assert worker.accepted > 0.4 * worker.proposed


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_are_published_where_nothing_is_proposed(
    plain: list[list[int]], ahead: bool
) -> None:
    worker = Worker(draft=True, ahead=ahead, longest=0)
    assert worker.serve(prompts(), 40) == plain
    assert worker.proposed == 0
    size = worker.pool.block_size
    for prompt, output in zip(prompts(), plain, strict=True):
        tokens = [*prompt, *output]
        names = identity.chain(KEY, ROOT, tokens, size)
        behind = len(prompt) + len(output) - CATCH_UP_TOKENS - 2
        assert worker.pool.held_prefix(names) >= behind // size > len(prompt) // size


def test_a_later_request_speculates_from_published_blocks(plain: list[list[int]]) -> None:
    worker = Worker(draft=True)
    worker.serve(prompts(), 40)
    before = worker.accepted
    assert worker.serve(prompts(), 40) == plain
    assert worker.accepted > before


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
