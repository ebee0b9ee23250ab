"""How requests end: one end per choice, nothing after it, and indices without a gap (I4)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from baton.decode_worker.requests import Requests
from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group, Request, RequestUpdate
from baton.decode_worker.submit_parser import parse_submit
from baton.engine.scheduling.batch import Drawn, StepResult, failed_result
from baton.engine.scheduling.blocks import BlockPool
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import metrics
from baton.runtime.config import StepConfig
from baton.runtime.errors import BatonError, DeadlineExceeded, EngineError, HandoffError, WorkerLost
from baton.runtime.grammar.choice_masks import ChoiceMasks, InlineMasks
from baton.runtime.wire import ModelLimits
from tests.support.grammar_scene import costly_grammar, failed_masks
from tests.support.metric_values import metric_value

LIMITS = ModelLimits(
    vocab_size=100, max_context=64, fingerprint="model", kv_dtype="float32", key=b"key"
)


class Bench:
    """One request of a worker without an engine; what it emits is kept."""

    def __init__(self, n: int = 1, local: bool = True, **fields: object) -> None:
        self.pool = BlockPool(64, 4)
        self.scheduler = DecodeScheduler(self.pool, StepConfig(), b"key")
        self.requests = Requests(self.scheduler, LIMITS, lambda: 50.0, StepConfig())
        self.outputs: list[worker_pb2.Output] = []
        values: dict[str, Any] = {
            "request_id": "r",
            "attempt": 3,
            "prompt": range(6),
            "choices": [worker_pb2.Choice(choice=c) for c in range(n)],
            "sampling": worker_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
            "max_tokens": 3,
            "stop_token_ids": [99],
            "placement": worker_pb2.Placement(local=local),
        }
        submit = worker_pb2.Submit(**{**values, **fields})
        self.request: Request = parse_submit(submit, LIMITS, self._emit, now_s=0.0, wall_s=0.0)
        self.sequences = list(self.request.sequences)
        self.scheduler.submit(self.request)
        self.requests.add(self.request)

    def _emit(self, output: worker_pb2.Output) -> None:
        self.outputs.append(output)

    def draw(self, token: int, choice: int = 0) -> None:
        self.requests.accept(self.sequences[choice], Drawn(choice, token))

    def fetching(self) -> Group:
        (group,) = self.scheduler.admit()
        return group

    def said(self, choice: int = 0) -> list[tuple[int, int | None, int]]:
        """(index, token, end) of one choice."""
        return [
            (o.index, o.token if o.HasField("token") else None, o.end)
            for o in self.outputs
            if o.choice == choice
        ]


def first_tokens(*tokens: tuple[int, int]) -> handoff_pb2.FirstTokens:
    drawn = [handoff_pb2.FirstToken(choice=choice, token=token) for choice, token in tokens]
    return handoff_pb2.FirstTokens(tokens=drawn)


def test_tokens_are_numbered_and_the_last_one_carries_the_end() -> None:
    bench = Bench()
    for token in (10, 11, 12):
        bench.draw(token)
    assert bench.said() == [(0, 10, 0), (1, 11, 0), (2, 12, worker_pb2.LENGTH)]
    assert {(o.request_id, o.attempt) for o in bench.outputs} == {("r", 3)}
    assert bench.requests.get("r") is None and bench.requests.living() == []


@pytest.mark.parametrize(("reason", "said"), [("fuel", "token (fuel): "), ("", "token: ")])
def test_masks_that_failed_end_the_choice(reason: str, said: str) -> None:
    """Without a reason too: the draw had no mask, so its token may be none of the grammar."""
    bench = Bench()
    bench.sequences[0].masks = failed_masks(reason)
    bench.draw(10)
    (output,) = bench.outputs
    assert not output.HasField("token") and output.failure.code == "InvalidRequest"
    assert f"for its next {said}make it simpler" in output.failure.detail


def test_masks_that_failed_for_rejected_proposals_end_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(stop_token_ids=[], max_tokens=4)
    (sequence,) = bench.sequences
    sequence.masks = ChoiceMasks(costly_grammar(monkeypatch), sequence.output, InlineMasks())
    base = sequence.masks.mask(start=True)
    assert base.extended(b"x").bitmask() is None
    bench.draw(ord("o"))
    bench.draw(ord("k"))
    assert bench.said() == [(0, ord("o"), 0), (1, ord("k"), 0)]


def test_masks_that_failed_end_the_choice_at_their_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token before them was drawn with a mask, and is emitted."""
    bench = Bench(stop_token_ids=[], max_tokens=4)
    (sequence,) = bench.sequences
    sequence.masks = ChoiceMasks(costly_grammar(monkeypatch), sequence.output, InlineMasks())
    assert sequence.masks.mask(start=True).extended(b"x").bitmask() is None
    bench.draw(ord("x"))
    bench.draw(ord("?"))
    (first, last) = bench.outputs
    assert (first.token, first.end) == (ord("x"), 0)
    assert not last.HasField("token") and last.failure.code == "InvalidRequest"


def test_a_stop_token_is_emitted_and_ends_its_choice() -> None:
    bench = Bench()
    bench.draw(99)
    assert bench.said() == [(0, 99, worker_pb2.STOP)]


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    bench = Bench(max_tokens=1)
    bench.draw(99)
    assert bench.said() == [(0, 99, worker_pb2.STOP)]


@pytest.mark.parametrize("how", ["cancel", "fail", "deadline", "draw"])
def test_nothing_follows_the_end(how: str) -> None:
    bench = Bench(max_tokens=1)
    bench.draw(10)
    said = bench.said()
    if how == "cancel":
        bench.requests.cancel(bench.request)
    elif how == "fail":
        bench.requests.fail(bench.sequences[0], EngineError("x"))
    elif how == "deadline":
        bench.requests.deadline_passed(bench.request)
    else:
        bench.draw(11)
    assert bench.said() == said == [(0, 10, worker_pb2.LENGTH)]


def test_a_request_lives_until_its_last_choice_has_ended() -> None:
    bench = Bench(n=2)
    bench.draw(99, choice=0)
    assert bench.requests.get("r") is bench.request
    bench.draw(20, choice=1)
    bench.requests.cancel(bench.request)
    assert bench.said(0) == [(0, 99, worker_pb2.STOP)]
    assert bench.said(1) == [(0, 20, 0), (1, None, worker_pb2.CANCELLED)]
    assert bench.requests.get("r") is None


def test_one_choice_may_be_cancelled_and_the_others_go_on() -> None:
    bench = Bench(n=2)
    bench.draw(10, choice=0)
    bench.draw(20, choice=1)
    bench.requests.cancel(bench.request, [1])
    assert bench.said(1) == [(0, 20, 0), (1, None, worker_pb2.CANCELLED)]
    bench.draw(21, choice=1)  # it was under way
    bench.draw(11, choice=0)
    bench.draw(99, choice=0)
    assert len(bench.said(1)) == 2
    assert bench.said(0) == [(0, 10, 0), (1, 11, 0), (2, 99, worker_pb2.STOP)]
    assert bench.requests.get("r") is None


@pytest.mark.parametrize("last", ["stop string", "stop token", "gone", "failed", "late"])
def test_only_a_completed_request_counts_as_served(last: str) -> None:
    """A request counts once, by its last choice: of it a router takes the pace of a line."""
    bench = Bench(n=2)
    bench.draw(99, choice=0)
    assert bench.requests.served == 0
    if last == "stop string":
        bench.requests.cancel(bench.request, [0, 1])
    elif last == "stop token":
        bench.draw(99, choice=1)
    elif last == "gone":
        bench.requests.cancel(bench.request)
    elif last == "failed":
        bench.requests.fail(bench.sequences[1], EngineError("x"))
    else:
        bench.requests.deadline_passed(bench.request)
    bench.requests.cancel(bench.request, [1])  # too late, and without effect
    assert bench.requests.living() == []
    assert bench.requests.served == (last in ("stop string", "stop token"))


def test_a_retry_counts_on_from_its_accepted_tokens() -> None:
    bench = Bench(choices=[worker_pb2.Choice(choice=0, accepted=[5, 6])])
    bench.draw(7)
    assert bench.said() == [(2, 7, worker_pb2.LENGTH)]


@pytest.mark.parametrize(
    ("error", "retryable"), [(WorkerLost("stopping"), True), (DeadlineExceeded("late"), False)]
)
def test_a_failure_says_whether_another_worker_may_continue(
    error: BatonError, retryable: bool
) -> None:
    bench = Bench()
    bench.draw(10)
    bench.requests.fail(bench.sequences[0], error)
    assert bench.said()[1] == (1, None, worker_pb2.FAILED)
    failure = bench.outputs[1].failure
    assert (failure.code, failure.detail, failure.retryable) == (error.code, str(error), retryable)


def test_a_passed_deadline_ends_every_choice_that_still_runs() -> None:
    bench = Bench(n=2)
    bench.draw(99, choice=1)
    bench.requests.deadline_passed(bench.request)
    assert bench.said(0) == [(0, None, worker_pb2.FAILED)]
    assert bench.outputs[-1].failure.code == "DeadlineExceeded"
    assert bench.said(1) == [(0, 99, worker_pb2.STOP)]


async def test_the_deadline_of_an_ended_request_does_not_ring() -> None:
    rung: list[str] = []
    bench = Bench(n=2)
    loop = asyncio.get_running_loop()
    bench.request.deadline = loop.call_later(3600.0, rung.append, "r")
    bench.draw(99, choice=0)
    assert not bench.request.deadline.cancelled()
    bench.draw(99, choice=1)
    assert bench.request.deadline.cancelled()


def test_logprobs_and_cached_tokens_travel_with_the_token() -> None:
    bench = Bench()
    bench.request.cached_tokens = 4
    (sequence,) = bench.sequences
    bench.requests.accept(sequence, Drawn(0, 10, -0.25, ((10, -0.25), (11, -2.0))))
    bench.draw(11)
    first, second = bench.outputs
    assert first.logprob == -0.25 and first.cached_tokens == 4
    assert [(top.token, top.logprob) for top in first.top] == [(10, -0.25), (11, -2.0)]
    assert not second.HasField("logprob") and second.cached_tokens == 0


def test_first_tokens_are_emitted_once_over_all_handoff_tries() -> None:
    bench = Bench(n=2, local=False)
    group = bench.fetching()
    bench.requests.accept_first(group, first_tokens((1, 21), (0, 20)))
    bench.requests.accept_first(group, first_tokens((0, 30), (1, 31)))
    assert bench.said(0) == [(0, 20, 0)] and bench.said(1) == [(0, 21, 0)]


@pytest.mark.parametrize(
    "tokens",
    [(), ((0, 1),), ((0, 1), (2, 1)), ((0, 1), (1, 1), (2, 1)), ((0, 1), (1, 100))],
)
def test_first_tokens_that_do_not_fit_are_refused_whole(
    tokens: tuple[tuple[int, int], ...],
) -> None:
    bench = Bench(n=2, local=False)
    with pytest.raises(HandoffError, match="first token"):
        bench.requests.accept_first(bench.fetching(), first_tokens(*tokens))
    assert bench.outputs == []


def test_a_choice_cancelled_before_it_gets_no_first_token() -> None:
    bench = Bench(n=2, local=False)
    group = bench.fetching()
    bench.requests.fail(bench.sequences[0], EngineError("x"))
    before = metric_value(metrics.TOKENS.labels("output"))
    bench.requests.accept_first(group, first_tokens((0, 20), (1, 21)))
    assert bench.said(0) == [(0, None, worker_pb2.FAILED)]
    assert bench.said(1) == [(0, 21, 0)]
    assert metric_value(metrics.TOKENS.labels("output")) - before == 1


def test_an_ended_waiting_request_holds_nothing() -> None:
    bench = Bench(local=False)
    bench.requests.cancel(bench.request)
    assert bench.scheduler.admit() == [] and bench.scheduler.waiting == 0
    counts = bench.pool.counts()
    assert counts.available == counts.total


class Emitter:
    """Keeps what a request says, as a router's session does."""

    def __init__(self, said: list[worker_pb2.Output]) -> None:
        self._said = said

    def __call__(self, word: RequestUpdate) -> None:
        assert isinstance(word, worker_pb2.Output)
        self._said.append(word)


@pytest.mark.parametrize("how", ["draw", "cancel", "fail"])
def test_an_ended_request_is_in_no_reference_cycle(how: str) -> None:
    """Its outputs are freed with their last holder, not when Python looks for cycles."""
    bench = Bench(n=2, max_tokens=1)
    bench.request.emit = Emitter(bench.outputs)
    emitter = weakref.ref(bench.request.emit)
    for choice in (0, 1):
        if how == "draw":
            bench.draw(10, choice)
        elif how == "cancel":
            bench.requests.cancel(bench.request, [choice])
        else:
            bench.requests.fail(bench.sequences[choice], EngineError("x"))
    assert [said.end > 0 for said in bench.outputs] == [True, True]
    gc.disable()
    try:
        bench.sequences.clear()
        del bench.request
        assert emitter() is None
    finally:
        gc.enable()


def test_a_step_is_recorded_with_all_that_it_computed() -> None:
    """Also the chunk of a prompt that was cancelled while it ran: the time is that of both."""
    bench = Bench()
    bench.scheduler.admit()
    plan = bench.scheduler.plan()
    bench.requests.record_step(plan, failed_result(plan.batch), [], 10.0, 10.25)
    assert bench.requests.work()["recent_steps"] == []
    bench.requests.record_step(plan, StepResult(((),)), [], 20.0, 20.5)
    ((tokens, _, sequences, _, seconds),) = bench.requests.work()["recent_steps"]
    assert (tokens, sequences, seconds) == (6, 0, 0.5)
