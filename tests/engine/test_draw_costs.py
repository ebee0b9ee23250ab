"""What draws cost, as measured, and the sum over a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from baton.engine.execution import gpu_loading, loading
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.ranks import loading as ranks_loading
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.scheduling.draw_costs import ZERO_COSTS, DrawCosts, measure_draws
from baton.runtime.sampling import SamplingParams
from tests.support.model_story import ModelStory
from tests.support.small_models import Reference

COSTS = DrawCosts(1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0)
GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("params", "seconds"),
    [
        (GREEDY, 1),
        (SamplingParams(temperature=0.0, top_p=0.5), 1),  # no rule cuts a greedy draw
        (SamplingParams(), 11),
        (SamplingParams(top_k=5), 111),
        (SamplingParams(min_p=0.1), 111),
        (SamplingParams(temperature=0.0, presence_penalty=0.1), 1001),
        (SamplingParams(temperature=0.0, logit_bias=((1, 2.0),)), 1001),
        (SamplingParams(temperature=0.0, top_logprobs=0), 10001),
    ],
)
def test_draw_costs_what_its_rules_do(params: SamplingParams, seconds: float) -> None:
    assert COSTS.draw_s(params, masked=False) == seconds
    assert ZERO_COSTS.draw_s(params, masked=True) == 0


def test_step_costs_what_all_its_draws_do() -> None:
    two = (Draw(0, 1, GREEDY), Draw(1, 1, SamplingParams()))
    batch = StepBatch((Slice([1], 0, [0], two), Slice([1, 2], 0, [1]), Slice([1], 0, [2], two)))
    assert COSTS.batch_s(batch) == 24


class NoMask:
    """Admits all tokens."""

    def bitmask(self) -> None:
        return None

    def extended(self, tokens: Sequence[int]) -> NoMask:
        return self


def test_draws_with_a_mask_cost_more() -> None:
    masked = Draw(0, 1, SamplingParams(), None, NoMask())
    assert COSTS.draws_s([masked, Draw(0, 1, GREEDY)]) == 100012


def test_masks_are_measured_as_dear() -> None:
    def draw(draws: Sequence[Draw]) -> None:
        read = [each.allowed.bitmask() for each in draws if each.allowed is not None]
        assert all(bits is not None and len(bits) == 7 for bits in read)
        # A draw costs this time, which is measured.
        time.sleep(0.0005 * len(draws) + 0.004 * len(read))

    found = measure_draws(draw, 50)
    assert found.masked_s >= 0.0015
    assert max(found.random_s, found.cut_s, found.adjusted_s, found.logprobs_s) < found.masked_s


def test_dear_rules_are_measured_as_dear() -> None:
    def draw(draws: Sequence[Draw]) -> None:
        cut = sum(each.params.top_p < 1 for each in draws)
        # A draw costs this time, which is measured.
        time.sleep(0.0005 * len(draws) + 0.004 * cut)

    found = measure_draws(draw, 50)
    assert found.greedy_s >= 0.0005 and found.cut_s >= 0.0015
    assert max(found.random_s, found.adjusted_s, found.logprobs_s) < found.cut_s


def test_a_runner_measures_its_own_draws(qwen3: Reference) -> None:
    found = ModelStory(qwen3.folder).runner.measure_draws()
    assert found.greedy_s > 0 and COSTS.draws_s([]) == 0


@pytest.fixture
def measured(qwen3: Reference, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ModelRunner]:
    """A small model's folder and runner, whose draws have costs that no device has."""
    monkeypatch.setattr(ModelRunner, "measure_draws", lambda self: COSTS)
    return qwen3.folder, ModelStory(qwen3.folder).runner


def costs_of(engine: TorchEngine) -> DrawCosts:
    asyncio.run(engine.close())
    return engine.draw_costs


def test_a_cpu_engine_knows_the_measured_costs(measured: tuple[Path, ModelRunner]) -> None:
    folder, _ = measured
    assert costs_of(loading.build_engine(folder, EngineOptions(blocks=8, threads=1))) == COSTS


def test_a_gpu_engine_knows_the_measured_costs(
    measured: tuple[Path, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, runner = measured
    monkeypatch.setattr(loading, "chosen_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(gpu_loading, "gpu_runner", lambda *_: runner)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert costs_of(loading.build_engine(folder, EngineOptions(threads=1))) == COSTS


def test_an_engine_of_ranks_knows_the_measured_costs(
    measured: tuple[Path, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, runner = measured
    monkeypatch.setattr(ranks_loading, "build_rank_runner", lambda *_, **__: runner)
    engine = ranks_loading.build_rank_engine(folder, 2, EngineOptions(threads=1))
    assert costs_of(engine) == COSTS
