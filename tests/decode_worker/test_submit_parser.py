"""Submits from the wire: every bound at both of its sides, and what a Request is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import pytest

from baton.decode_worker.sequences import Request
from baton.decode_worker.submit_parser import MAX_CANDIDATES, parse_submit
from baton.proto import worker_pb2
from baton.runtime.errors import InvalidRequest
from baton.runtime.identity import tenant_of
from baton.runtime.wire import MAX_CHOICES, ModelLimits

LIMITS = ModelLimits(
    vocab_size=100, max_context=16, fingerprint="model", kv_dtype="float32", key=b"key"
)


def choices(count: int) -> list[worker_pb2.Choice]:
    return [worker_pb2.Choice(choice=number) for number in range(count)]


class Fields(TypedDict, total=False):
    prompt: Sequence[int]
    max_tokens: int
    choices: Sequence[worker_pb2.Choice]
    sampling: worker_pb2.Sampling
    placement: worker_pb2.Placement


def read(**fields: object) -> Request:
    values: dict[str, Any] = {
        "request_id": "r",
        "attempt": 2,
        "prompt": [1, 2, 3],
        "choices": choices(1),
        "sampling": worker_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, seed=9),
        "max_tokens": 5,
    }
    submit = worker_pb2.Submit(**{**values, **fields})
    return parse_submit(submit, LIMITS, lambda output: None, now_s=1.5, wall_s=100.5)


def test_what_was_submitted_comes_through() -> None:
    candidates = [worker_pb2.Candidate(worker_id="p", boot_id=b"b", address="h:1")]
    request = read(
        stop_token_ids=[7, 8, 7],
        cache_salt=b"tenant",
        placement=worker_pb2.Placement(local=True, candidates=candidates),
    )
    assert (request.request_id, request.attempt, request.prompt) == ("r", 2, [1, 2, 3])
    assert (request.max_tokens, request.stop_token_ids) == (5, frozenset({7, 8}))
    assert request.local and request.candidates == candidates
    assert (request.sampling.seed, request.wire_sampling.seed) == (9, 9)
    assert request.root == LIMITS.root(b"tenant") != LIMITS.root(b"")
    assert request.tenant == tenant_of(b"tenant")
    assert (request.arrived_s, request.arrived_wall_s) == (1.5, 100.5)
    assert not request.ended and request.deadline is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [100]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 17}, "max_tokens"),
        ({"max_tokens": 14}, "max_tokens"),  # fits alone, not behind the prompt
        ({"max_tokens": 2**32 - 1}, "max_tokens"),
        ({"prompt": range(16), "max_tokens": 1}, "max_tokens"),
        ({"choices": []}, "n"),
        ({"choices": choices(MAX_CHOICES + 1)}, "n"),
        ({"choices": [worker_pb2.Choice(choice=3), worker_pb2.Choice(choice=3)]}, "n"),
        ({"choices": [worker_pb2.Choice(accepted=[4]), worker_pb2.Choice(choice=1)]}, "choices"),
        ({"choices": [worker_pb2.Choice(accepted=range(5))]}, "choices"),
        ({"choices": [worker_pb2.Choice(accepted=[100])]}, "accepted"),
        ({"sampling": worker_pb2.Sampling(top_p=2.0, repetition_penalty=1.0)}, "top_p"),
        (
            {
                "placement": worker_pb2.Placement(
                    candidates=[worker_pb2.Candidate()] * (MAX_CANDIDATES + 1)
                )
            },
            "placement",
        ),
    ],
)
def test_what_is_out_of_bounds_is_named(fields: Fields, named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.field == named


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 13},
        {"prompt": range(15), "max_tokens": 1},
        {"prompt": [99]},
        {"choices": choices(MAX_CHOICES)},
        {"choices": [worker_pb2.Choice(accepted=range(4))]},
        {"placement": worker_pb2.Placement(candidates=[worker_pb2.Candidate()] * MAX_CANDIDATES)},
    ],
)
def test_what_lies_just_within_is_taken(fields: Fields) -> None:
    request = read(**fields)
    assert len(request.sequences) == len(fields.get("choices", [0]))


def test_a_retry_goes_on_behind_its_accepted_tokens() -> None:
    request = read(choices=[worker_pb2.Choice(choice=4, accepted=[50, 51])])
    (sequence,) = request.sequences
    assert (sequence.choice, sequence.output, sequence.length) == (4, [50, 51], 5)
    assert sequence.growth_left == 3
    assert [sequence.token_at(index) for index in range(5)] == [1, 2, 3, 50, 51]


@pytest.mark.parametrize(
    ("start", "end", "tokens"),
    [
        (0, 5, [1, 2, 3, 50, 51]),
        (0, 3, [1, 2, 3]),
        (1, 2, [2]),
        (3, 5, [50, 51]),
        (4, 5, [51]),
        (2, 4, [3, 50]),
        (3, 3, []),
    ],
)
def test_a_span_crosses_from_the_prompt_into_the_output(
    start: int, end: int, tokens: list[int]
) -> None:
    (sequence,) = read(choices=[worker_pb2.Choice(accepted=[50, 51])]).sequences
    assert sequence.span(start, end) == tokens


def test_a_draw_has_all_tokens_only_where_a_penalty_reads_them() -> None:
    accepted = [worker_pb2.Choice(choice=1, accepted=[50])]
    (plain,) = read(choices=accepted).sequences
    assert (plain.draw().choice, plain.draw().position, plain.draw().history) == (1, 4, None)
    sampling = worker_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, presence_penalty=0.5)
    (penalised,) = read(choices=accepted, sampling=sampling).sequences
    history = penalised.draw().history
    assert history is not None and list(history) == [1, 2, 3, 50] and history.prompt_tokens == 3


def test_a_request_has_ended_with_its_last_choice() -> None:
    request = read(choices=choices(2))
    request.sequences[1].ended = True
    assert not request.ended
    request.sequences[0].ended = True
    assert request.ended
