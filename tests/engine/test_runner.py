from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.scheduling.token_history import history_of
from baton.runtime.errors import ConfigError, EngineError
from baton.runtime.sampling import SamplingParams
from tests.support.model_story import ModelStory, greedy_slice, random_prompt
from tests.support.small_models import Reference

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def reported(qwen3: Reference) -> ModelStory:
    return ModelStory(qwen3.folder)


def test_choices_of_one_prompt_draw_from_the_same_logits(reported: ModelStory) -> None:
    tokens, blocks = random_prompt(20), reported.blocks(20)
    params = SamplingParams(temperature=1.5, seed=5)
    draws = tuple(Draw(choice, 20, params) for choice in (0, 1, 2, 7))
    result = reported.runner.run(StepBatch((Slice(tokens, 0, blocks, draws),)))
    (drawn,) = result.drawn
    assert [each.choice for each in drawn] == [0, 1, 2, 7]
    assert len({each.token for each in drawn}) > 1
    again = reported.runner.run(StepBatch((Slice(tokens[-1:], 19, blocks, draws[3:]),)))
    assert again.drawn[0][0].token == drawn[3].token
    assert result.device_s > 0


def test_results_stand_in_the_order_of_the_slices(reported: ModelStory) -> None:
    """Rows are reordered inside (decodes first); the caller does not see it."""
    lengths = [5, 1, 12, 1, 3]
    slices = [
        greedy_slice(random_prompt(length, seed=length + index), 0, reported.blocks(length))
        for index, length in enumerate(lengths)
    ]
    alone = [reported.draw(item)[0] for item in slices]
    silent = Slice(random_prompt(4), 0, reported.blocks(4))
    result = reported.runner.run(StepBatch((slices[0], silent, *slices[1:])))
    assert [len(drawn) for drawn in result.drawn] == [1, 0, 1, 1, 1, 1]
    assert [drawn[0].token for drawn in result.drawn if drawn] == alone


def test_all_logits_are_in_the_order_of_the_slices(reported: ModelStory) -> None:
    lengths = [5, 1, 12]
    slices = [Slice(random_prompt(n, seed=n), 0, reported.blocks(n)) for n in lengths]
    together = reported.logits(*slices)
    for item, logits in zip(slices, together, strict=True):
        torch.testing.assert_close(logits, reported.logits(item)[0], rtol=0, atol=2e-5)


def test_batch_composition_changes_logits_by_rounding_alone(reported: ModelStory) -> None:
    """Recorded, since the fault lab relies on it: see also the report in docs."""
    tokens, blocks = random_prompt(30), reported.blocks(40)
    reported.logits(Slice(tokens, 0, blocks))
    alone = reported.logits(Slice([7], 30, blocks))[0]
    others = []
    for n in range(1, 9):
        mine = reported.blocks(9)
        reported.logits(Slice(random_prompt(8, seed=n), 0, mine))
        others.append(Slice([n], 8, mine))
    batched = reported.logits(Slice([7], 30, blocks), *others)[0]
    assert (alone - batched).abs().max().item() < 2e-5


def test_one_broken_sequence_does_not_harm_the_others(reported: ModelStory) -> None:
    good, bad = reported.blocks(20), reported.blocks(20)
    reported.logits(Slice(random_prompt(16), 0, good), Slice(random_prompt(16, seed=1), 0, bad))
    slices = [
        greedy_slice([3], 16, good),
        greedy_slice([4], 16, bad),
        greedy_slice([5, 6], 16, bad),
    ]
    (alone,) = reported.draw(slices[0])
    reported.runner.pool.tensor[bad[0], 0, 1, 1, 0] = float("inf")
    result = reported.runner.run(StepBatch((*slices, Slice([1, 2], 16, bad))))
    assert result.broken == {1, 2, 3}
    assert [len(drawn) for drawn in result.drawn] == [1, 0, 0, 0]
    assert result.drawn[0][0].token == alone


def test_a_chunk_without_draws_is_found_broken_too(reported: ModelStory) -> None:
    blocks = reported.blocks(40)
    reported.logits(Slice(random_prompt(16), 0, blocks))
    reported.runner.pool.tensor[blocks[1]] = float("nan")
    result = reported.runner.run(StepBatch((Slice(random_prompt(8), 16, blocks),)))
    assert result.broken == {0}


def test_a_refused_step_writes_nothing(reported: ModelStory) -> None:
    before = reported.runner.pool.bytes_view().copy()
    with pytest.raises(EngineError, match="slice 1"):
        reported.runner.run(StepBatch((Slice([1], 0, [0]), Slice([1], 0, [9999]))))
    assert (reported.runner.pool.bytes_view() == before).all()


def test_context_limit(qwen3: Reference) -> None:
    reported = ModelStory(qwen3.folder, max_context=24)
    assert reported.runner.max_context == 24
    blocks = reported.blocks(40)
    reported.logits(Slice(random_prompt(24), 0, blocks))
    with pytest.raises(EngineError, match="25 tokens exceed 24"):
        reported.logits(Slice([1], 24, blocks))


@pytest.mark.parametrize("max_context", [513, -1])
def test_a_context_that_the_model_does_not_have(qwen3: Reference, max_context: int) -> None:
    with pytest.raises(ConfigError, match=r"worker\.max_context .* 512"):
        build_runner(qwen3.folder, EngineOptions(blocks=4, max_context=max_context))


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_backends_draw_the_same(qwen3: Reference, backend: str) -> None:
    reported = ModelStory(qwen3.folder, backend=backend)
    prompt = random_prompt(33)
    assert reported.greedy(prompt, reported.blocks(60), 20) == qwen3.greedy(prompt, 20)


def test_bfloat16_stays_near_float32(qwen3: Reference) -> None:
    reported, tokens = ModelStory(qwen3.folder, dtype="bfloat16"), random_prompt(40)
    (ours,) = reported.logits(Slice(tokens, 0, reported.blocks(40)))
    assert ours.dtype == torch.float32
    theirs = qwen3.logits(tokens)
    assert (ours - theirs).abs().mean() < 0.05 * theirs.abs().mean()


def test_seeded_draws_survive_a_change_of_chunks(reported: ModelStory) -> None:
    """A migrated request computes its KV in other chunks and goes on with the same tokens."""
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=123)
    prompt = random_prompt(30)

    def go_on(tokens, count, chunk):
        blocks, out, start = reported.blocks(60), [], 0
        while start < len(tokens) - chunk:
            reported.logits(Slice(tokens[start : start + chunk], start, blocks))
            start += chunk
        todo = tokens[start:]
        for _ in range(count):
            draw = Draw(0, start + len(todo), params)
            out += reported.draw(Slice(todo, start, blocks, (draw,)))
            start, todo = start + len(todo), [out[-1]]
        return out

    whole = go_on(prompt, 20, 30)
    moved = go_on([*prompt, *whole[:8]], 12, 7)
    assert whole[8:] == moved


def test_penalties_reach_the_draw(reported: ModelStory) -> None:
    tokens, blocks = random_prompt(20), reported.blocks(30)
    (first,) = reported.draw(Slice(tokens, 0, blocks, (Draw(0, 20, GREEDY),)))
    params = SamplingParams(temperature=0.0, presence_penalty=50.0)
    history = history_of([*tokens, first], 20)
    (second,) = reported.draw(Slice(tokens[-1:], 19, blocks, (Draw(0, 20, params, history),)))
    assert second != first


@pytest.mark.parametrize("token", [-1, 199, 1 << 40])
def test_a_bias_on_an_unknown_token_breaks_its_own_slice_alone(
    reported: ModelStory, token: int
) -> None:
    good, bad = greedy_slice(random_prompt(5), 0, reported.blocks(5)), reported.blocks(5)
    (alone,) = reported.draw(good)
    params = SamplingParams(temperature=0.0, logit_bias=((3, 1.0), (token, 1.0)))
    draws = (Draw(0, 5, params),)
    result = reported.runner.run(StepBatch((Slice(random_prompt(5), 0, bad, draws), good)))
    assert result.broken == {0}
    assert [drawn.token for drawn in result.drawn[1]] == [alone]


def test_dtype_follows_the_stored_one(qwen3: Reference, tmp_path: Path) -> None:
    assert build_runner(qwen3.folder, EngineOptions(blocks=2)).pool.tensor.dtype == torch.float32
    folder = shutil.copytree(qwen3.folder, tmp_path / "half")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    half = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(half, folder / "model.safetensors")
    assert build_runner(folder, EngineOptions(blocks=2)).pool.tensor.dtype == torch.bfloat16
