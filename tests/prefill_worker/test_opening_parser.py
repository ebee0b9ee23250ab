"""Openings from the wire: every bound at both of its sides, and what a Prompt says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import pytest

from baton.engine.scheduling.batch import Drawn
from baton.prefill_worker.opening_parser import parse_opening
from baton.prefill_worker.prompts import Prompt
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import identity
from baton.runtime.errors import EngineError, InvalidRequest
from baton.runtime.wire import MAX_CHOICES, ModelLimits

SIZE = 4
LIMITS = ModelLimits(
    vocab_size=100, max_context=16, fingerprint="model", kv_dtype="float32", key=b"key"
)


class Fields(TypedDict, total=False):
    tokens: Sequence[int]
    prompt_tokens: int
    held_blocks: int
    choices: Sequence[int]
    sampling: worker_pb2.Sampling


def read(ended: list[Prompt] | None = None, **fields: object) -> Prompt:
    values: dict[str, Any] = {
        "request_id": "r",
        "tokens": range(9),
        "prompt_tokens": 9,
        "choices": [0],
        "sampling": worker_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, seed=3),
        "lease_ms": 1000,
    }
    opening = handoff_pb2.OpenHandoff(**{**values, **fields})
    on_end = ended.append if ended is not None else lambda prompt: None
    return parse_opening(opening, LIMITS, SIZE, on_end, wall_s=12.5)


def test_what_was_asked_for_comes_through() -> None:
    prompt = read(held_blocks=1, choices=[5, 2], prompt_tokens=7)
    assert (prompt.request_id, prompt.tokens, prompt.prompt_tokens) == ("r", list(range(9)), 7)
    assert (prompt.held_blocks, prompt.choices, prompt.arrived_wall_s) == (1, [5, 2], 12.5)
    assert prompt.params.seed == 3
    assert (prompt.blocks, prompt.pinned, prompt.ended) == ([], [], False)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": range(17)}, "tokens"),
        ({"tokens": [1, 100]}, "tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": 10}, "prompt_tokens"),
        ({"held_blocks": 3}, "held_blocks"),
        ({"tokens": range(8), "prompt_tokens": 8, "held_blocks": 2}, "held_blocks"),
        ({"held_blocks": 2**32 - 1}, "held_blocks"),
        ({"choices": []}, "choices"),
        ({"choices": [1, 2, 1]}, "choices"),
        ({"choices": range(MAX_CHOICES + 1)}, "choices"),
        ({"sampling": worker_pb2.Sampling(repetition_penalty=1.0)}, "top_p"),
        ({"sampling": worker_pb2.Sampling(top_p=1.0)}, "repetition_penalty"),
    ],
)
def test_what_is_out_of_bounds_is_named(fields: Fields, named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.field == named


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": range(16), "prompt_tokens": 16},
        {"tokens": [99], "prompt_tokens": 1},
        {"prompt_tokens": 1},
        {"held_blocks": 2},  # the ninth token is left to compute
        {"tokens": range(8), "prompt_tokens": 8, "held_blocks": 1},
        {"choices": range(MAX_CHOICES)},
    ],
)
def test_what_lies_just_within_is_taken(fields: Fields) -> None:
    assert read(**fields).tokens == list(fields.get("tokens", range(9)))


def test_each_full_block_has_the_name_that_the_reader_gives_it() -> None:
    prompt = read(cache_salt=b"tenant")
    assert prompt.identities == identity.chain(b"key", LIMITS.root(b"tenant"), range(9), SIZE)
    assert len(prompt.identities) == 2 and prompt.tenant == identity.tenant_of(b"tenant")
    assert set(prompt.identities).isdisjoint(read(cache_salt=b"other").identities)


def test_choices_draw_from_the_last_position_with_their_history() -> None:
    draws = read(choices=[4, 1]).draws()
    assert [(draw.choice, draw.position, draw.history) for draw in draws] == [
        (4, 9, None),
        (1, 9, None),
    ]
    penalised = worker_pb2.Sampling(top_p=1.0, repetition_penalty=1.3)
    (draw,) = read(sampling=penalised, prompt_tokens=5).draws()
    assert draw.history is not None and draw.history.prompt_tokens == 5
    assert list(draw.history) == list(range(9))


def test_first_tokens_carry_logprobs_only_if_requested() -> None:
    prompt = read()
    prompt.cached = 2
    message = prompt.first_tokens([Drawn(0, 7), Drawn(1, 8, -0.5, ((8, -0.5), (9, -1.0)))], SIZE)
    assert message.cached_tokens == 8
    plain, reported = message.tokens
    assert (plain.choice, plain.token, plain.HasField("logprob"), len(plain.top)) == (
        0,
        7,
        False,
        0,
    )
    assert (reported.choice, reported.token, reported.logprob) == (1, 8, -0.5)
    assert [(top.token, top.logprob) for top in reported.top] == [(8, -0.5), (9, -1.0)]


async def test_events_are_ordered_and_the_prompts_end_is_raised() -> None:
    prompt = read()
    first = handoff_pb2.FirstTokens(cached_tokens=1)
    for event in (first, None, EngineError("broken")):
        prompt.events.put_nowait(event)
    assert await prompt.next() is first
    assert await prompt.next() is None
    with pytest.raises(EngineError, match="broken"):
        await prompt.next()


def test_the_end_is_reported_to_the_worker() -> None:
    ended: list[Prompt] = []
    prompt = read(ended)
    prompt.end()
    assert prompt.ended and ended == [prompt]
