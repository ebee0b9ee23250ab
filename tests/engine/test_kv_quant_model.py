"""Whole models over eight-bit pools: the same tokens however a sequence is computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import baton.engine.execution.backend_choice as backend_choice
from baton.engine.cpu.attention_kv_quant import KvQuantAttention
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_engine, build_runner
from baton.engine.model.attention import TorchAttention
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.models.random_model import make_shaped_model
from baton.runtime.errors import ConfigError
from tests.support.decoder_probe import parts_of
from tests.support.eagle3_heads import HeadShape, ReferenceHead, save_head
from tests.support.model_story import ModelStory, greedy_slice, random_prompt
from tests.support.small_models import Reference

STEPS = 12
SHAPE = {
    "layers": 2,
    "hidden": 128,
    "head_dim": 64,
    "ffn": 192,
    "vocab": 4096,
    "dtype": "bfloat16",
    "seed": 3,
}


@pytest.fixture(params=["int8", pytest.param("fp8_e4m3", marks=pytest.mark.nightly)])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shaped_model(tmp_path_factory.mktemp("bf16"), heads=4, kv_heads=2, **SHAPE)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """By name: the options of a draft of two KV heads, of three, and of an EAGLE-3 head."""
    shape = HeadShape(SHAPE["vocab"], SHAPE["hidden"], (0, 1, 2))
    head = save_head(ReferenceHead(shape), tmp_path_factory.mktemp("head"), "speculators")
    two, three = (
        make_shaped_model(tmp_path_factory.mktemp("draft"), heads=kv, kv_heads=kv, **SHAPE)
        for kv in (2, 3)
    )
    return {
        "two-heads": {"draft_folder": two},
        "three-heads": {"draft_folder": three},
        "eagle3": {"draft_folder": head, "draft_kind": "eagle3"},
    }


HOWS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "torch": {"dtype": "float32", "backend": "torch"},
    "deterministic": {"dtype": "bfloat16", "deterministic": True},
}


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


# `make test` has int8 in the default mode: each of the others compiles kernels of its own.
@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=[] if how == "bfloat16" else pytest.mark.nightly) for how in HOWS],
)
def test_whole_chunked_cached_and_scattered_give_the_same_tokens(
    folder: Path, kv_dtype: str, how: str
) -> None:
    # In bfloat16 a row may be rounded to the next code where its chunk is cut elsewhere: of eight
    # prompts one has two tokens so nearly alike that this decides (seed 4, over FP8 codes).
    prompt = random_prompt(70, seed=5, vocab=4000)
    reported = ModelStory(folder, block_size=16, kv_dtype=kv_dtype, **HOWS[how])
    whole = reported.blocks(90)
    expected = reported.greedy(prompt, whole, STEPS)
    chunked = reported.blocks(90)  # elsewhere in the pool, in pieces, beside another sequence
    reported.logits(Slice(prompt[:33], 0, chunked))
    reported.logits(Slice(prompt[:20], 0, reported.blocks(20)), Slice(prompt[33:64], 33, chunked))
    reported.logits(Slice(prompt[64:65], 64, chunked))
    assert reported.greedy(prompt, chunked, STEPS, start=65) == expected
    cached = [*whole[:4], *reported.blocks(26)]  # the first 64 tokens are another's blocks
    assert reported.greedy(prompt, cached, STEPS, start=64) == expected


@pytest.mark.nightly
def test_a_sequence_is_the_same_bits_where_the_mode_promises_it(
    folder: Path, kv_dtype: str
) -> None:
    prompt = random_prompt(70, seed=4, vocab=4000)
    reported = ModelStory(folder, kv_dtype=kv_dtype, **HOWS["deterministic"])
    (whole,) = reported.logits(Slice(prompt, 0, reported.blocks(70)))
    table, parts = reported.blocks(70), []
    for first, end in ((0, 33), (33, 64), (64, 65), (65, 66), (66, 70)):
        parts.append(reported.logits(Slice(prompt[first:end], first, table))[0])
    assert torch.equal(torch.cat(parts), whole)
    plain = ModelStory(folder, **HOWS["deterministic"])
    assert reported.runner.numerics != plain.runner.numerics  # no block is taken for another's


@pytest.mark.parametrize("draft", ["two-heads", "three-heads", "eagle3"])
@pytest.mark.parametrize(
    "how", ["bfloat16", pytest.param("deterministic", marks=pytest.mark.nightly)]
)
def test_a_draft_in_the_same_blocks_changes_no_bit(
    folder: Path, drafts: dict[str, dict[str, object]], kv_dtype: str, how: str, draft: str
) -> None:
    """Of chunks, of decode rows and of what is written; the draft's KV is no number."""
    prompt, found = random_prompt(70, seed=4, vocab=4000), []
    for given in ({}, drafts[draft]):
        reported = ModelStory(folder, block_size=16, kv_dtype=kv_dtype, **HOWS[how], **given)
        pool, table = reported.runner.pool, [*reported.blocks(96)]
        if given:
            pool.draft.memory.fill_(255)
        parts = reported.logits(Slice(prompt[:33], 0, table))
        parts += reported.logits(Slice(prompt[33:64], 33, table))
        for at in range(64, 70):
            beside = Slice(prompt[:20], 0, reported.blocks(20))
            parts += reported.logits(Slice(prompt[at : at + 1], at, table), beside)
        found.append((torch.cat(parts), pool.memory[table]))
    assert found[0][0].isfinite().all() and torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1][:4], found[1][1][:4])


def test_eight_bit_latents_give_the_same_tokens_on_all_paths(
    references: Callable[[str], Reference], kv_dtype: str
) -> None:
    """Chunks that are expanded and chunks that are not, and rows that decode, over one pool."""
    prompt, folder = random_prompt(70, seed=5), references("deepseek-v3").folder
    reported = ModelStory(folder, kv_dtype=kv_dtype)
    whole = reported.blocks(90)
    expected = reported.greedy(prompt, whole, STEPS)
    chunked = reported.blocks(90)
    reported.logits(Slice(prompt[:33], 0, chunked))
    reported.logits(Slice(prompt[:20], 0, reported.blocks(20)), Slice(prompt[33:64], 33, chunked))
    assert reported.greedy(prompt, chunked, STEPS, start=64) == expected
    cached = [*whole[:8], *reported.blocks(26)]
    assert reported.greedy(prompt, cached, STEPS, start=64) == expected


SEEN = {"qwen3": (0.015, 0.067), "gemma2": (0.0057, 0.027), "mistral": (0.032, 0.14)}


@pytest.mark.parametrize("name", list(SEEN))
def test_logits_are_close_to_those_of_plain_kv(
    references: Callable[[str], Reference], kv_dtype: str, name: str
) -> None:
    """Windows, soft caps and groups of a whole model; the bounds are half and twice of what
    was seen, of int8 and of FP8."""
    prompt, found = random_prompt(60, seed=2), []
    for kind in ("auto", kv_dtype):
        reported = ModelStory(references(name).folder, kv_dtype=kind)
        found.append(torch.cat(reported.logits(Slice(prompt, 0, reported.blocks(60)))))
    seen = SEEN[name][kv_dtype == "fp8_e4m3"]
    assert seen / 2 < error(found[1], found[0]) < 2 * seen


def test_compiled_and_plain_torch_compute_the_same(folder: Path, kv_dtype: str) -> None:
    """But for a number in the middle between two codes, which either may round its own way."""
    tokens, table = random.Random(5).choices(range(4000), k=50), list(range(4))
    found, codes = [], []
    for backend, kind in (("auto", KvQuantAttention), ("torch", TorchAttention)):
        runner = build_runner(
            folder, EngineOptions(blocks=8, dtype="float32", backend=backend, kv_dtype=kv_dtype)
        )
        assert type(parts_of(runner.decoder).attention) is kind
        found.append(runner.all_logits(StepBatch((Slice(tokens, 0, table),)))[0])
        codes.append(runner.pool.tensor.view(torch.uint8))
    assert (codes[0] != codes[1]).sum() <= 3
    assert error(*found) < 1e-4


def test_float16_takes_torch(folder: Path, kv_dtype: str) -> None:
    """The compiled kernels write no codes of float16 rows."""
    tokens, found = random.Random(5).choices(range(4000), k=40), []
    for dtype in ("float16", "float32"):
        runner = build_runner(folder, EngineOptions(blocks=8, dtype=dtype, kv_dtype=kv_dtype))
        found.append(runner.all_logits(StepBatch((Slice(tokens, 0, [4, 1, 6]),)))[0])
        assert (type(parts_of(runner.decoder).attention) is TorchAttention) == (dtype == "float16")
    assert error(*found) < 0.02


def test_without_numba_torch_serves(
    folder: Path, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_choice, "find_spec", lambda name: None)
    runner = build_runner(folder, EngineOptions(blocks=8, kv_dtype=kv_dtype))
    assert type(parts_of(runner.decoder).attention) is TorchAttention
    assert runner.all_logits(StepBatch((Slice([1, 2, 3], 0, [0]),)))[0].isfinite().all()


def test_kv_that_is_no_number_breaks_its_sequence_alone(folder: Path, kv_dtype: str) -> None:
    reported = ModelStory(folder, block_size=16, kv_dtype=kv_dtype, dtype="bfloat16")
    good, bad = reported.blocks(40), reported.blocks(40)
    prompt = random_prompt(30, seed=1, vocab=4000)
    for table in (good, bad):
        reported.logits(Slice(prompt, 0, table))
    reported.runner.pool.scales[bad[1], 0, 1, 1, 3] = float("nan")
    batch = StepBatch((greedy_slice([1], 30, bad), greedy_slice([1], 30, good)))
    result = reported.runner.run(batch)
    assert result.broken == {0} and [len(drawn) for drawn in result.drawn] == [0, 1]


def test_memory_is_shown_with_what_the_pool_holds(folder: Path, kv_dtype: str) -> None:
    plain, small = (
        build_runner(folder, EngineOptions(blocks=8, kv_dtype=kind)).memory
        for kind in ("auto", kv_dtype)
    )
    assert small.block_bytes == plain.block_bytes * (64 + 4) // 128
    assert f"({kv_dtype} of bfloat16) = 8 blocks" in small.line()
    sized = build_runner(folder, EngineOptions(kv_dtype=kv_dtype, memory_fraction=0.01)).memory
    assert sized.blocks * sized.block_bytes <= 0.01 * sized.free_bytes


async def test_an_engine_names_its_kind(folder: Path, kv_dtype: str) -> None:
    engine = build_engine(folder, EngineOptions(blocks=8, kv_dtype=kv_dtype))
    assert engine.dtype_name == f"{kv_dtype} of bfloat16"
    await engine.close()


def test_what_is_refused(folder: Path, references: Callable[[str], Reference]) -> None:
    with pytest.raises(ConfigError, match=r"pool\.kv_dtype is 'int4': give auto or one of int8"):
        build_runner(folder, EngineOptions(blocks=8, kv_dtype="int4"))
    latent = references("deepseek-v2").folder
    with pytest.raises(
        ConfigError, match=r"worker\.deterministic: latent attention on a CPU.*int8"
    ):
        build_runner(latent, EngineOptions(blocks=8, kv_dtype="int8", deterministic=True))
