"""The promise: whatever is around a sequence, its logits are the same bit for bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton.engine.checkpoint.fingerprint import model_fingerprint
from baton.engine.cpu.attention_bf16_invariant import InvariantBfloatAttention
from baton.engine.cpu.dot_bf16 import supported
from baton.engine.execution import determinism_proof, invariant_kernels
from baton.engine.execution.determinism_proof import prove
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_engine, build_runner
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.runtime.errors import ConfigError
from baton.runtime.sampling import SamplingParams
from tests.support.decoder_probe import parts_of
from tests.support.engine_probe import runner_of
from tests.support.model_story import ModelStory, random_prompt
from tests.support.small_models import Reference

FAMILIES = [
    "llama",
    "llama-biased",
    "llama-dynamic-rope",
    "mistral-window",
    "gemma2",
    "mixtral",
    "deepseek-v3",
]
WIDE = ["qwen3-wide", "gemma2-wide", "mixtral-wide"]  # in bfloat16, by the kernels for it
REPRESENTATIVES = {"gemma2", "deepseek-v3", "qwen3", "mixtral-wide"}  # of `make test`
LENGTH = 90


def by_cost(name, *more):
    """A parameter that runs in `make nightly` unless its model is a representative."""
    marks = () if name in REPRESENTATIVES else pytest.mark.nightly
    return pytest.param((name, *more) if more else name, marks=marks)


@pytest.fixture(
    params=[by_cost(name, "float32") for name in FAMILIES]
    + [by_cost(name, "bfloat16") for name in ("qwen3", "deepseek-v2", *WIDE)],
    ids=str,
)
def model(
    request: pytest.FixtureRequest, references: Callable[[str], Reference]
) -> tuple[Path, str]:
    name, dtype = request.param
    return references(name).folder, dtype


@pytest.fixture(autouse=True)
def short_proof(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The proof over many sizes takes a second, and has tests of its own."""
    if "whole_proof" not in request.fixturenames:
        monkeypatch.setattr(determinism_proof, "SIZES_TOKENS", 40)


@pytest.fixture
def whole_proof() -> int:
    return determinism_proof.SIZES_TOKENS


@pytest.fixture
def reported(model: tuple[Path, str]) -> ModelStory:
    folder, dtype = model
    return ModelStory(folder, dtype=dtype, deterministic=True, block_size=16)


def whole(reported, tokens):
    """Logits [tokens, vocab] in one step of its own, and the blocks."""
    blocks = reported.blocks(len(tokens))
    return reported.logits(Slice(tokens, 0, blocks))[0], blocks


def crowd(reported, chooser):
    """Up to four other slices, chunks and single tokens, with their prefixes in place."""
    slices = []
    for _ in range(chooser.randrange(4)):
        seed, count = chooser.randrange(1000), chooser.choice([1, 1, 3, 20])
        start = chooser.randrange(1, 12)
        tokens, blocks = random_prompt(start + count, seed=seed), reported.blocks(start + count)
        reported.logits(Slice(tokens[:start], 0, blocks))
        slices.append(Slice(tokens[start:], start, blocks))
    reported.release(*slices)
    return slices


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
def test_chunks_and_crowds_change_no_bit(reported: ModelStory, seed: int) -> None:
    tokens, chooser = random_prompt(LENGTH, seed=3), random.Random(seed)
    expected, _ = whole(reported, tokens)
    blocks, start = reported.blocks(LENGTH), 0
    while start < LENGTH:
        end = min(LENGTH, start + chooser.choice([1, 1, 2, 8, 13, 40]))
        slices = crowd(reported, chooser)
        index = chooser.randrange(len(slices) + 1)
        slices.insert(index, Slice(tokens[start:end], start, blocks))
        assert torch.equal(reported.logits(*slices)[index], expected[start:end])
        start = end


def test_a_cached_prefix_changes_no_bit(reported: ModelStory) -> None:
    """It was computed by another sequence, in other chunks, and lies in shared blocks."""
    size, tokens = reported.block_size, random_prompt(LENGTH, seed=3)
    expected, _ = whole(reported, tokens)
    donor = reported.blocks(64)
    for start in range(0, 64, 16):
        reported.logits(Slice(tokens[start : start + 16], start, donor))
    for shared in (1, 3, 64 // size):
        blocks = [*donor[:shared], *reported.blocks(LENGTH - shared * size)]
        start = shared * size
        assert torch.equal(
            reported.logits(Slice(tokens[start:], start, blocks))[0], expected[start:]
        )


@pytest.mark.parametrize("cuts", [range(1, 34), (511, 513), (512, 512), (1, 255, 257, 47, 463)])
@pytest.mark.parametrize("name", [by_cost(name) for name in WIDE])
def test_the_bfloat16_kernels_keep_to_it_at_every_size(
    references: Callable[[str], Reference], name: str, cuts: Sequence[int]
) -> None:
    reported = ModelStory(
        references(name).folder, dtype="bfloat16", deterministic=True, block_size=16
    )
    if supported():
        assert isinstance(parts_of(reported.runner.decoder).attention, InvariantBfloatAttention)
    tokens = random_prompt(sum(cuts), seed=4)
    expected, _ = whole(reported, tokens)
    blocks, start = reported.blocks(len(tokens)), 0
    for count in cuts:
        piece = Slice(tokens[start : start + count], start, blocks)
        assert torch.equal(reported.logits(piece)[0], expected[start : start + count]), count
        start += count


@pytest.mark.parametrize("name", [by_cost(name) for name in WIDE])
def test_every_length_decodes_to_the_bits_of_a_chunk(
    references: Callable[[str], Reference], name: str
) -> None:
    reported = ModelStory(
        references(name).folder, dtype="bfloat16", deterministic=True, block_size=16
    )
    tokens = random_prompt(300, seed=5)
    expected, blocks = whole(reported, tokens)
    rows = reported.logits(*(Slice([token], at, blocks) for at, token in enumerate(tokens)))
    assert torch.equal(torch.cat(rows), expected)


@pytest.mark.parametrize("name", [by_cost(name) for name in WIDE])
def test_the_bfloat16_numbers_are_those_of_transformers(
    references: Callable[[str], Reference], name: str
) -> None:
    """Up to the rounding of bfloat16, by which a mixture now and then chooses another expert."""
    reference, tokens = references(name), random_prompt(130, seed=7)
    reported = ModelStory(reference.folder, dtype="bfloat16", deterministic=True, block_size=16)
    logits, _ = whole(reported, tokens)
    wanted = reference.logits(tokens)
    errors = (logits - wanted).square().mean(dim=-1).sqrt() / wanted.std(dim=-1)  # [tokens]
    assert (errors.median() if "mixtral" in name else errors.max()) < 0.15


def test_the_kv_is_the_same_too(reported: ModelStory) -> None:
    tokens = random_prompt(64, seed=3)
    _, once = whole(reported, tokens)
    again = reported.blocks(64)
    for index, token in enumerate(tokens):
        reported.logits(Slice([token], index, again))
    stored = reported.runner.pool.bytes_view()
    assert (stored[once] == stored[again]).all()


def test_a_preempted_sequence_goes_on_with_the_same_tokens(reported: ModelStory) -> None:
    """Recomputed in one chunk, prompt and output alike, and drawn beside others."""
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=5)

    def go_on(tokens, steps, beside):
        known, blocks, todo, start = list(tokens), reported.blocks(80), list(tokens), 0
        for _ in range(steps):
            others = crowd(reported, beside) if beside else []
            draw = (Draw(0, len(known), params),)
            known += reported.draw(*others, Slice(todo, start, blocks, draw))
            start, todo = len(known) - 1, known[-1:]
        return known

    prompt = random_prompt(30)
    alone = go_on(prompt, 24, None)
    assert go_on(alone[:41], 13, random.Random(4)) == alone


def test_threads_change_no_bit(reported: ModelStory) -> None:
    tokens = random_prompt(LENGTH, seed=3)
    expected, _ = whole(reported, tokens)
    torch.set_num_threads(2)
    try:
        assert torch.equal(whole(reported, tokens)[0], expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", [by_cost(name) for name in FAMILIES])
def test_the_numbers_are_those_of_transformers(
    references: Callable[[str], Reference], name: str
) -> None:
    reference, tokens = references(name), random_prompt(70, seed=7)
    reported = ModelStory(reference.folder, deterministic=True)
    logits, _ = whole(reported, tokens)
    torch.testing.assert_close(logits, reference.logits(tokens), rtol=0, atol=1e-4)


def test_workers_are_named_by_their_bits(qwen3: Reference) -> None:
    def numerics(**how):
        return build_runner(
            qwen3.folder, EngineOptions(blocks=40, deterministic=True, **how)
        ).numerics

    plain = build_runner(qwen3.folder, EngineOptions(blocks=4))
    assert plain.numerics is None
    first = numerics()
    assert len(first) == 32
    assert numerics(block_size=10) == first
    assert numerics(block_size=1) == first  # a small pool, and so a short proof
    assert numerics(dtype="bfloat16") != first
    named = {
        model_fingerprint(qwen3.folder, numerics=name)
        for name in ("", first, numerics(dtype="bfloat16"))
    }
    assert len(named) == 3


def test_the_proof_leaves_the_pool_as_it_was(qwen3: Reference) -> None:
    runner = build_runner(qwen3.folder, EngineOptions(blocks=40, deterministic=True))
    assert not runner.pool.bytes_view().any()


def test_a_small_pool_is_enough_for_the_proof(qwen3: Reference) -> None:
    assert build_runner(
        qwen3.folder, EngineOptions(blocks=2, block_size=4, deterministic=True)
    ).numerics
    with pytest.raises(ConfigError, match=r"pool\.blocks is 1: worker\.deterministic needs two"):
        build_runner(qwen3.folder, EngineOptions(blocks=1, block_size=4, deterministic=True))


@pytest.mark.parametrize("part", ["attention", "gate", "linears"])
def test_a_runner_that_fails_the_proof_is_refused(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """With the ordinary part in place of one of the three."""
    from baton.engine.model.attention import TorchAttention
    from baton.engine.model.row_ops import torch_gating

    if part == "attention":
        monkeypatch.setattr(invariant_kernels, "InvariantAttention", TorchAttention)
    elif part == "gate":
        monkeypatch.setattr(
            invariant_kernels,
            "strict_gate",
            lambda x, activation: torch_gating(x, activation) * (1 + 1e-6 * len(x)),
        )
    else:
        monkeypatch.setattr(invariant_kernels, "with_invariant_linears", summed_by_rows)
    with pytest.raises(ConfigError, match=r"worker\.deterministic: on this machine"):
        build_runner(qwen3.folder, EngineOptions(blocks=40, deterministic=True))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", "float32"),
        pytest.param("llama-dynamic-rope", "float32", marks=pytest.mark.nightly),
        pytest.param("gemma2-wide", "bfloat16", marks=pytest.mark.nightly),
    ],
)
def test_the_proof_covers_many_sizes(
    references: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
    whole_proof: int,
    name: str,
    dtype: str,
) -> None:
    """A gate that is wrong for one number of rows alone does not pass, whichever number it is;
    nor one that is wrong for a late token."""
    assert whole_proof == 1024
    folder, gate = references(name).folder, invariant_kernels.invariant_gate
    counts = set()

    def watched(gate_up, activation):
        counts.add(len(gate_up))
        return gate(gate_up, activation)

    monkeypatch.setattr(invariant_kernels, "invariant_gate", watched)
    build_runner(folder, EngineOptions(blocks=160, block_size=16, dtype=dtype, deterministic=True))
    large = {512} if name == "qwen3" else {511, 512, 513, 1024}  # as far as the context goes
    assert counts >= {*range(1, 34)} | large
    for wrong in {1, 12, 33} | large:
        monkeypatch.setattr(
            invariant_kernels,
            "invariant_gate",
            lambda x, activation, wrong=wrong: gate(x, activation) * (1 + (len(x) == wrong) / 64),
        )
        with pytest.raises(ConfigError, match=r"worker\.deterministic: on this machine"):
            build_runner(
                folder, EngineOptions(blocks=160, block_size=16, dtype=dtype, deterministic=True)
            )


def summed_by_rows(weights):
    """The head's product in another order for an even number of rows."""
    from dataclasses import replace

    head = weights.head
    return replace(weights, head=lambda x: head(x) if len(x) % 2 else head(x * 3) / 3)


def test_without_numba_the_setting_is_refused_by_name(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "baton.engine.execution.invariant_kernels", None)
    with pytest.raises(ConfigError, match=r"worker\.deterministic needs numba"):
        build_runner(qwen3.folder, EngineOptions(blocks=4, deterministic=True))


async def test_the_engine_tells_the_numerics(qwen3: Reference) -> None:
    engine = build_engine(qwen3.folder, EngineOptions(blocks=40, threads=1, deterministic=True))
    assert len(engine.numerics) == 32
    await engine.close()
    assert prove(runner_of(engine)) == engine.numerics


def test_one_broken_sequence_does_not_harm_the_others(qwen3: Reference) -> None:
    reported = ModelStory(qwen3.folder, deterministic=True)
    tokens = random_prompt(20)
    expected, good = whole(reported, tokens)
    bad = reported.blocks(20)
    reported.logits(Slice(tokens, 0, bad))
    reported.runner.pool.tensor[bad[1]] = float("nan")
    batch = StepBatch((Slice(tokens[19:], 19, bad), Slice(tokens[18:], 18, good)))
    result = reported.runner.run(batch)
    assert result.broken == {0}
    assert torch.equal(reported.logits(*batch.slices)[1], expected[18:])


def test_float16_is_refused(qwen3: Reference) -> None:
    with pytest.raises(ConfigError, match=r"worker\.deterministic: KV in torch"):
        build_runner(qwen3.folder, EngineOptions(blocks=8, dtype="float16", deterministic=True))
