"""A model over several rank processes, held against transformers; ranks that fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.cpu.decode_pass import DecodePass
from baton.engine.cpu.linear_numba import can_pack
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.ranks.loading import RankRunner, build_rank_runner
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.models.random_model import make_shaped_model
from baton.runtime.errors import ConfigError, DeviceLost, ModelError
from baton.runtime.sampling import SamplingParams
from tests.support import packed_weights
from tests.support.decoder_probe import parts_of, sum_over_ranks, with_fused_pass
from tests.support.machine_speed import slowness
from tests.support.model_story import ModelStory, random_prompt
from tests.support.small_models import MODELS, Reference

TOLERANCE = 1e-4
FAMILIES = ["qwen2", "mixtral", "deepseek-v3"]  # one KV head for two ranks; experts; latents
MIXTURES = [
    "deepseek-v3",
    *(
        pytest.param(name, marks=pytest.mark.nightly)
        for name in ("mixtral", "qwen3-moe", "qwen3-moe-mixed", "deepseek-v2")
    ),
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
        ep = int(str(changes.get("ep", 1)))
        made.append(build_rank_runner(reference.folder, ranks, options, ep=ep))
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


@pytest.mark.nightly  # divided experts have latents in `make test`, the deterministic mode qwen3
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_transformers(
    references: Callable[[str], Reference], make: Make, family: str
) -> None:
    reference = references(family)
    assert_equals_transformers(make(reference), reference)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", MODELS)
def test_every_family_equals_transformers(
    references: Callable[[str], Reference], make: Make, family: str, ranks: int
) -> None:
    reference = references(family)
    assert_equals_transformers(make(reference, ranks), reference)


@pytest.mark.parametrize("family", MIXTURES)
def test_divided_experts_equal_transformers(
    references: Callable[[str], Reference], make: Make, family: str
) -> None:
    reference = references(family)
    assert_equals_transformers(make(reference, ep=2), reference)


@pytest.mark.nightly
@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
def test_groups_of_four_ranks_equal_transformers(
    references: Callable[[str], Reference], make: Make, family: str, ep: int
) -> None:
    reference = references(family)
    assert_equals_transformers(make(reference, 4, ep=ep), reference)


@pytest.mark.nightly
def test_divided_experts_keep_their_bits_in_any_batch(
    references: Callable[[str], Reference], make: Make
) -> None:
    runner = make(references("mixtral"), ep=2, deterministic=True)
    tokens = random_prompt(40)
    text = Slice(tokens, 0, list(range(5)))
    (alone,) = runner.all_logits(StepBatch((text,)))
    for count in (1, 7, 30):
        others = [
            Slice(random_prompt(count, seed=seed), 0, list(range(10 + 4 * seed, 14 + 4 * seed)))
            for seed in range(4)
        ]
        beside = runner.all_logits(StepBatch((*others[:2], text, *others[2:])))[2]
        assert torch.equal(beside, alone)
    assert runner.numerics != make(references("mixtral"), deterministic=True).numerics


@pytest.mark.nightly
def test_kv_of_divided_experts_serves_other_workers(
    references: Callable[[str], Reference], make: Make
) -> None:
    """A prompt computed with whole experts is continued with slices of them, and by one process;
    the bytes of its blocks are all that moves."""
    reference = references("mixtral")
    prompt, blocks = random_prompt(30), list(range(4))
    whole = make(reference, ep=2)
    whole.all_logits(StepBatch((Slice(prompt, 0, blocks),)))
    moved = whole.pool.bytes_view()[: len(blocks)].copy()
    alone = ModelStory(reference.folder, threads=1).runner
    for other in (make(reference), alone):
        other.pool.bytes_view()[: len(blocks)] = moved
        last, found = prompt[-1], []
        for position in range(len(prompt) - 1, len(prompt) + 7):
            draw = Draw(0, position + 1, GREEDY)
            step = Slice([last], position, [*blocks, 50], (draw,))
            last = other.run(StepBatch((step,))).drawn[0][0].token
            found.append(last)
        assert found == reference.greedy(prompt, 8)


@pytest.mark.nightly
def test_stored_quantised_experts_are_divided(
    references: Callable[[str], Reference], make: Make, tmp_path: Path
) -> None:
    """FP8 experts whose blocks of scales two ranks could not share."""
    folder = with_fp8_experts(references("mixtral").folder, tmp_path / "fp8")
    reference = Reference("mixtral", folder, references("mixtral").model)
    tokens = random_prompt(50)
    step = StepBatch((Slice(tokens, 0, list(range(7))),))
    (wanted,) = ModelStory(folder, threads=1).runner.all_logits(step)
    (found,) = make(reference, ep=2).all_logits(step)
    assert (found - wanted).abs().max().item() < TOLERANCE * max(1.0, wanted.abs().max().item())
    assert (wanted - reference.logits(tokens)).abs().max().item() > 10 * TOLERANCE  # quantised
    with pytest.raises(ModelError, match="group of scales; reduce worker.tp or raise worker.ep"):
        make(reference)


def with_fp8_experts(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        made, _ = packed_weights.fp8(tensors.pop(name), rows=32, columns=32)
        base = name.removesuffix("weight")
        tensors |= {f"{base}{key}": value.contiguous() for key, value in made.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.nightly
def test_a_rank_holds_half_of_the_experts(
    references: Callable[[str], Reference], make: Make
) -> None:
    reference = references("mixtral")
    runner = make(reference, ep=2)
    for layer in parts_of(runner.decoder).weights.layers:
        assert (layer.mlp.experts.first, len(layer.mlp.experts.down)) == (0, 2)
        assert layer.mlp.experts.down[1](torch.zeros(1, 96)).shape == (1, 64)  # whole
    os.kill(runner.group.process_ids[0], signal.SIGKILL)
    with pytest.raises(DeviceLost, match="rank 1"):
        greedy(runner, [1, 2, 3], 2)


def test_groups_that_do_not_fit_are_refused(
    qwen3: Reference, references: Callable[[str], Reference], make: Make
) -> None:
    with pytest.raises(ConfigError, match="worker.ep is 2, but a qwen3 model has no experts"):
        make(qwen3, ep=2)
    with pytest.raises(ConfigError, match="worker.ep is 3 and worker.tp 2"):
        make(references("mixtral"), ep=3)


def test_a_deterministic_model_keeps_its_bits_over_ranks(qwen3: Reference, make: Make) -> None:
    runner = make(qwen3, deterministic=True)  # proved while it was made
    assert runner.numerics
    assert_equals_transformers(runner, qwen3)


@pytest.mark.nightly
def test_a_rank_holds_half_of_the_weights(qwen3: Reference, make: Make) -> None:
    runner = make(qwen3)
    own = parts_of(runner.decoder).weights
    assert own.embedding.shape[0] in (99, 100) and own.embedding.shape[1] == 64
    assert own.layers[0].mlp.down(torch.zeros(1, 48)).shape == (1, 64)


def test_a_dead_rank_ends_the_next_step(qwen3: Reference, make: Make) -> None:
    runner = make(qwen3)
    os.kill(runner.group.process_ids[0], signal.SIGKILL)
    begun_s = time.monotonic()
    with pytest.raises(DeviceLost, match="rank 1"):
        greedy(runner, [1, 2, 3], 2)
    assert time.monotonic() - begun_s < 3.0 * slowness()


@pytest.mark.nightly
def test_a_rank_that_stands_still_ends_the_step(qwen3: Reference, make: Make) -> None:
    runner = make(qwen3)
    os.kill(runner.group.process_ids[0], signal.SIGSTOP)
    with pytest.raises(
        DeviceLost, match="rank 1 did not take part in a sum over 2 ranks within 1 s"
    ):
        greedy(runner, [1, 2, 3], 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_leaves_ranks_to_the_leader(
    qwen3: Reference, make: Make, number: signal.Signals
) -> None:
    """The leader drains then, and computes with its ranks until the last answer."""
    runner = make(qwen3)
    (process,) = runner.group.process_ids
    os.kill(process, number)
    assert greedy(runner, [1, 2, 3], 4) == qwen3.greedy([1, 2, 3], 4)


def test_ranks_end_with_their_runner(qwen3: Reference, make: Make) -> None:
    runner = make(qwen3)
    (process,) = runner.group.process_ids
    runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_number_of_ranks_that_does_not_divide_is_refused(qwen3: Reference, make: Make) -> None:
    with pytest.raises(ConfigError, match="worker.tp is 3"):
        make(qwen3, ranks=3)


def test_float16_is_refused_before_a_rank_loads(qwen3: Reference) -> None:
    options = EngineOptions(blocks=80, block_size=8, dtype="float16", threads=1)
    with pytest.raises(ConfigError, match=r"worker\.dtype is float16.*give auto, bfloat16"):
        build_rank_runner(qwen3.folder, 2, options)


def test_what_a_rank_cannot_load_is_raised_here(
    references: Callable[[str], Reference], make: Make, tmp_path: Path
) -> None:
    reference = references("llama")
    with pytest.raises(ModelError, match="no readable|config.json"):
        make(Reference("llama", tmp_path, reference.model))


@pytest.mark.skipif(
    not can_pack(torch.zeros(64, 64, dtype=torch.bfloat16)),
    reason="this processor's bfloat16 products are oneDNN's alone",
)
def test_the_compiled_pass_over_ranks_has_the_bits_of_the_layers(tmp_path: Path) -> None:
    """Layer by layer on the leader alone: both forms take part in the same sums."""
    folder = make_shaped_model(
        tmp_path,
        layers=3,
        hidden=192,
        heads=6,
        kv_heads=2,
        head_dim=64,
        ffn=384,
        vocab=4096,
        dtype="bfloat16",
        seed=7,
    )
    runner = build_rank_runner(folder, 2, EngineOptions(blocks=40, threads=1))
    try:
        runner.pool.tensor.normal_(generator=torch.Generator().manual_seed(2))
        step = StepBatch(
            tuple(
                Slice([3 + n], start, list(range(5 * n, 5 * n + 5)))
                for n, start in enumerate((0, 1, 15, 16, 40, 63))
            )
        )
        parts, before = parts_of(runner.decoder), runner.pool.tensor.clone()
        assert isinstance(parts.fused_pass, DecodePass)
        found = torch.cat(runner.all_logits(step))
        pool = runner.pool.tensor.clone()
        runner.pool.tensor.copy_(before)
        with with_fused_pass(runner.decoder, None):
            assert torch.equal(torch.cat(runner.all_logits(step)), found)
        assert torch.equal(runner.pool.tensor, pool)
        os.kill(runner.group.process_ids[0], signal.SIGKILL)
        sums = sum_over_ranks(runner.decoder)
        again = DecodePass(parts.spec, parts.weights, parts.attention.bfloat_pool, sums)
        with (
            with_fused_pass(runner.decoder, again),
            pytest.raises(DeviceLost, match="rank 1"),
        ):
            runner.all_logits(step)
    finally:
        runner.close()
