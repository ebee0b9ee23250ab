"""A model over several rank processes, held against transformers; ranks that fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.ranks.loading import RankRunner, build_rank_runner
from baton.engine.scheduling.batch import Draw, SamplingParams, Slice, StepBatch
from baton.runtime.errors import ConfigError, DeviceLost, ModelError
from tests.support.model_story import random_prompt
from tests.support.small_models import MODELS, Reference

TOLERANCE = 1e-4
FAMILIES = [  # one KV head for two ranks; experts; latents
    pytest.param("qwen2", marks=pytest.mark.nightly),
    pytest.param("mixtral", marks=pytest.mark.nightly),
    "deepseek-v3",
]
GREEDY = SamplingParams(temperature=0.0)

Make = Callable[..., RankRunner]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RankRunner] = []

    def runner(reference: Reference, ranks: int = 2, **changes: object) -> RankRunner:
        options = EngineOptions(
            blocks=80,
            block_size=8,
            dtype="float32",
            threads=1,
            deterministic=bool(changes.get("deterministic")),
        )
        made.append(build_rank_runner(reference.folder, ranks, options))
        made[-1].pool.tensor.fill_(float("nan"))
        return made[-1]

    yield runner
    for each in made:
        each.close()


def assert_equals_transformers(runner: RankRunner, reference: Reference) -> None:
    tokens = random_prompt(90)
    (found,) = runner.all_logits(StepBatch((Slice(tokens, 0, list(range(12))),)))
    wanted = reference.logits(tokens)
    scale = max(1.0, wanted.abs().max().item() / 10)
    assert (found - wanted).abs().max().item() < TOLERANCE * scale
    prompt, steps = random_prompt(13, seed=1), 16
    assert greedy(runner, prompt, steps) == reference.greedy(prompt, steps)


def greedy(runner: RankRunner, prompt: list[int], steps: int) -> list[int]:
    blocks, start, todo, found = list(range(20, 40)), 0, prompt, []
    for _ in range(steps):
        draw = Draw(0, start + len(todo), GREEDY)
        result = runner.run(StepBatch((Slice(todo, start, blocks, (draw,)),)))
        start, todo = start + len(todo), [result.drawn[0][0].token]
        found += todo
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_transformers(references, make: Make, family: str) -> None:
    reference = references(family)
    assert_equals_transformers(make(reference), reference)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", MODELS)
def test_every_family_equals_transformers(references, make: Make, family: str, ranks: int) -> None:
    reference = references(family)
    assert_equals_transformers(make(reference, ranks), reference)


def test_a_deterministic_model_keeps_its_bits_over_ranks(qwen3, make: Make) -> None:
    runner = make(qwen3, deterministic=True)  # proved while it was made
    assert runner.numerics
    assert_equals_transformers(runner, qwen3)


def test_a_rank_holds_half_of_the_weights(qwen3, make: Make) -> None:
    runner = make(qwen3)
    own = runner.decoder._own._weights  # type: ignore[attr-defined]
    assert own.embedding.shape[0] in (99, 100) and own.embedding.shape[1] == 64
    assert own.layers[0].mlp.down(torch.zeros(1, 48)).shape == (1, 64)


def test_a_dead_rank_ends_the_next_step(qwen3, make: Make) -> None:
    runner = make(qwen3)
    os.kill(runner.group.process_ids[0], signal.SIGKILL)
    begun_s = time.monotonic()
    with pytest.raises(DeviceLost, match="rank 1"):
        greedy(runner, [1, 2, 3], 2)
    assert time.monotonic() - begun_s < 3.0


def test_a_rank_that_stands_still_ends_the_step(qwen3, make: Make) -> None:
    runner = make(qwen3)
    os.kill(runner.group.process_ids[0], signal.SIGSTOP)
    with pytest.raises(
        DeviceLost, match="rank 1 did not take part in a sum over 2 ranks within 1 s"
    ):
        greedy(runner, [1, 2, 3], 1)


def test_ranks_end_with_their_runner(qwen3, make: Make) -> None:
    runner = make(qwen3)
    (process,) = runner.group.process_ids
    runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_number_of_ranks_that_does_not_divide_is_refused(qwen3, make: Make) -> None:
    with pytest.raises(ConfigError, match="worker.tp is 3"):
        make(qwen3, ranks=3)


def test_what_a_rank_cannot_load_is_raised_here(references, make: Make, tmp_path) -> None:
    reference = references("llama")
    with pytest.raises(ModelError, match="no readable|config.json"):
        make(Reference("llama", tmp_path, reference.model))
