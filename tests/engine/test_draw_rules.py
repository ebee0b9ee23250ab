"""How rows are drawn, as tensors."""

from __future__ import annotations

import math

import pytest
import torch

from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.noise import stream_key, stream_start
from baton.engine.scheduling.batch import Draw
from baton.runtime.sampling import SamplingParams


def test_rules_of_draws() -> None:
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


def test_a_key_follows_from_start_and_position_alone() -> None:
    assert stream_key(5, 1, 100) != stream_key(5, 1, 101)
    assert stream_key(5, 1, 100) == stream_key(5 + (1 << 64), 1, 100)
    assert stream_start(5, 1) != stream_start(1, 5)


def test_none_draws_greedily() -> None:
    greedy = Draw(0, 0, SamplingParams(0.0))
    for mine, theirs in zip(
        DrawRules.of([None]).tensors(), DrawRules.of([greedy]).tensors(), strict=True
    ):
        assert torch.equal(mine, theirs)
