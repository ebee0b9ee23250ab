"""Draws on a GPU equal draws on a CPU; the rules as tensors."""

import math

import pytest
import torch

from baton.engine.batch import Draw, SamplingParams
from baton.engine.noise import stream_key, stream_start
from baton.engine.triton_sampling import DrawRules, drawable

NAMES = ["greedy", "plain", "top-k", "top-p", "min-p", "all", "nothing kept but the best"]


@pytest.mark.parametrize("name", [*NAMES, "alone as in any slot of a batch"])
def test_a_draw_is_that_of_the_cpu(triton_checks, name):
    found = triton_checks[f"draws: {name}"]
    assert found["good"], found["said"]


def test_one_broken_row_harms_no_other(triton_checks):
    found = triton_checks["draws: rows that are not finite are told, the others unharmed"]
    assert found["good"], found["said"]


def test_rules_of_draws():
    greedy = Draw(0, 9, SamplingParams(temperature=0.0, seed=-1))
    warm = Draw(2, 1 << 40, SamplingParams(0.5, top_k=-1, top_p=0.25, min_p=0.5, seed=7))
    rules = DrawRules.of([greedy, warm])
    assert rules.inverse_temperature.tolist() == [0.0, 2.0]
    assert rules.top_k.tolist() == [0, 0]
    assert rules.top_p.tolist() == [1.0, 0.25]
    assert rules.log_min_p.tolist() == pytest.approx([-math.inf, math.log(0.5)])
    assert rules.position.tolist() == [9, 1 << 40]
    bits = [start % (1 << 64) for start in rules.start.tolist()]
    assert bits == [stream_start(-1, 0), stream_start(7, 2)]


def test_a_key_follows_from_start_and_position_alone():
    assert stream_key(5, 1, 100) != stream_key(5, 1, 101)
    assert stream_key(5, 1, 100) == stream_key(5 + (1 << 64), 1, 100)
    assert stream_start(5, 1) != stream_start(1, 5)


def test_room_draws_greedily_until_it_is_filled():
    room = DrawRules.room(3, torch.device("cpu"))
    for mine, theirs in zip(
        room.tensors(), DrawRules.of([Draw(0, 0, SamplingParams(0.0))]).tensors(), strict=True
    ):
        assert mine.dtype == theirs.dtype and mine.shape == (3,)
    assert room.inverse_temperature.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("params", "can"),
    [
        (SamplingParams(top_k=3, top_p=0.5, min_p=0.1), True),
        (SamplingParams(repetition_penalty=1.1), False),
        (SamplingParams(presence_penalty=0.1), False),
        (SamplingParams(logit_bias=((1, 2.0),)), False),
        (SamplingParams(top_logprobs=0), False),
    ],
)
def test_what_needs_the_host_is_known(params, can):
    assert drawable(Draw(0, 0, params)) is can
