"""A decode step in one compiled call against the same step layer by layer: bit for bit, in the
hidden states and in the pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import baton.engine.cpu.decode_pass as module
from baton.engine.checkpoint.weights import load_weights
from baton.engine.cpu.decode_pass import DecodePass, decode_pass
from baton.engine.cpu.linear import CpuMatrices, CpuMatrix
from baton.engine.cpu.linear_numba import can_pack
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.model.decoder import Decoder
from baton.engine.model.weights import Weights
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.models.random_model import make_shaped_model
from baton.runtime.sampling import SamplingParams
from tests.support.decoder_probe import parts_of, with_fused_pass
from tests.support.processors import without_matrix_unit
from tests.support.small_models import Reference

pytestmark = pytest.mark.skipif(
    not can_pack(torch.zeros(64, 64, dtype=torch.bfloat16), batch_invariant=True),
    reason="this processor's bfloat16 products are oneDNN's alone",
)
BLOCKS, SIZE, VOCAB = 40, 16, 256
STARTS = [0, 1, 15, 16, 40, 63]
GREEDY = (Draw(0, 1, SamplingParams(temperature=0.0)),)


@pytest.fixture(scope="module", autouse=True)
def no_matrix_unit() -> Iterator[None]:
    """A processor with AMX does here as one that has none: there a model takes the pass."""
    with pytest.MonkeyPatch.context() as patch:
        without_matrix_unit(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shaped_model(
        tmp_path_factory.mktemp("pass"),
        layers=3,
        hidden=192,
        heads=6,
        kv_heads=2,
        head_dim=64,
        ffn=320,
        vocab=4096,
        dtype="bfloat16",
        seed=7,
    )


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    made = build_runner(folder, EngineOptions(blocks=BLOCKS, block_size=SIZE))
    generator = torch.Generator().manual_seed(2)
    made.pool.tensor.copy_(torch.randn(made.pool.tensor.shape, generator=generator))
    return made


def slices(starts=STARTS):
    order = random.Random(1).sample(range(BLOCKS), BLOCKS)
    each = 5
    return [
        Slice([3 + n], start, order[n * each : n * each + start // SIZE + 1])
        for n, start in enumerate(starts)
    ]


def both_ways(runner, items):
    """(logits, pool) with the pass, and without it."""
    before, found = runner.pool.tensor.clone(), []
    for fused_pass in (parts_of(runner.decoder).fused_pass, None):
        runner.pool.tensor.copy_(before)
        with with_fused_pass(runner.decoder, fused_pass):
            logits = torch.cat(runner.all_logits(StepBatch(tuple(items))))
        found.append((logits, runner.pool.tensor.clone()))
    runner.pool.tensor.copy_(before)
    return found


def assert_same(found):
    (logits, pool), (expected, expected_pool) = found
    assert logits.isfinite().all()
    assert torch.equal(logits, expected) and torch.equal(pool, expected_pool)


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_it_gives_the_bits_of_the_layers(runner: ModelRunner, rows: int) -> None:
    assert_same(both_ways(runner, slices()[:rows]))


def test_more_rows_than_a_tile_has(runner: ModelRunner) -> None:
    assert_same(both_ways(runner, slices([n % 16 for n in range(8)])))


def test_two_threads(runner: ModelRunner) -> None:
    alone = both_ways(runner, slices())[0]
    torch.set_num_threads(2)
    try:
        found = both_ways(runner, slices())
    finally:
        torch.set_num_threads(1)
    assert_same(found)
    assert torch.equal(found[0][0], alone[0])


def test_two_tokens_of_one_sequence_see_each_other(runner: ModelRunner) -> None:
    """All of a layer's KV is written before any of it is read."""
    table = slices()[4].blocks
    items = [Slice([5], 41, table), Slice([9], 40, table)]
    found = both_ways(runner, items)
    assert_same(found)
    other = both_ways(runner, [items[0], Slice([8], 40, table)])
    assert not torch.equal(found[0][0][0], other[0][0][0])


def test_it_is_what_decode_steps_run(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        module.DecodePass,
        "__call__",
        lambda self, x, *rest: calls.append(len(x)) or torch.zeros_like(x),
    )
    runner.all_logits(StepBatch(tuple(slices())))
    assert calls == [len(STARTS)]
    runner.all_logits(StepBatch((Slice([1, 2], 0, [0]), *slices()[1:2])))
    assert calls == [len(STARTS)]  # a chunk goes layer by layer


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[ModelSpec, Weights]:
    spec = read_spec(folder)
    return spec, load_weights(folder, spec, torch.bfloat16, CpuMatrices())


def with_layer(weights, **changed):
    return replace(weights, layers=(*weights.layers[:-1], replace(weights.layers[-1], **changed)))


def test_layers_that_it_does_not_know_are_left_to_the_decoder(
    loaded: tuple[ModelSpec, Weights], runner: ModelRunner
) -> None:
    spec, weights = loaded
    pool, norm = runner.pool.tensor, weights.final_norm
    assert decode_pass(spec, weights, pool) is not None
    assert decode_pass(replace(spec, activation="gelu_tanh"), weights, pool) is None
    for changed in (
        {"output_norm": norm},
        {"attention_norm": norm},
        {"q_norm": None},
        {"mlp": object()},
        {"output": lambda x: x},
    ):
        assert decode_pass(spec, with_layer(weights, **changed), pool) is None


@pytest.mark.parametrize(
    "how",
    [
        {"kv_dtype": "int8"},
        {"kv_dtype": "fp8_e4m3"},
        {"deterministic": True},
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"backend": "torch"},
        {"quantization": "int8"},
        pytest.param({"quantization": "int4"}, marks=pytest.mark.nightly),
        {"block_size": 8},
    ],
    ids=str,
)
def test_other_ways_to_serve_go_layer_by_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, object]
) -> None:
    monkeypatch.setattr(DecodePass, "__call__", None)  # whoever calls it fails
    runner = build_runner(folder, EngineOptions(**{"blocks": BLOCKS, "block_size": SIZE, **how}))
    assert parts_of(runner.decoder).fused_pass is None
    given = [Slice([3 + n], 0, [n]) for n in range(3)]
    assert torch.cat(runner.all_logits(StepBatch(tuple(given)))).isfinite().all()


@pytest.mark.parametrize(
    "name", ["gemma2-wide", "mixtral-wide", "deepseek-v2", "qwen3-wide", "llama"]
)
def test_other_models_go_layer_by_layer(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Output norms and a GELU, experts, a latent pool, an MLP of 96 numbers, heads of 16."""
    monkeypatch.setattr(DecodePass, "__call__", None)
    folder = references(name).folder
    runner = build_runner(folder, EngineOptions(blocks=BLOCKS, block_size=SIZE, dtype="bfloat16"))
    assert parts_of(runner.decoder).fused_pass is None
    given = [Slice([3 + n], 0, [n]) for n in range(3)]
    assert torch.cat(runner.all_logits(StepBatch(tuple(given)))).isfinite().all()


def with_biases(layer):
    def biased(out, inputs):
        return CpuMatrix(torch.randn(out, inputs).div(8).bfloat16(), torch.randn(out).bfloat16())

    mlp = replace(layer.mlp, gate_up=biased(640, 192), down=biased(192, 320))
    return replace(layer, qkv=biased(640, 192), output=biased(192, 384), mlp=mlp)


def changed(spec, weights, change):
    if change == "no norms":
        layers = tuple(replace(layer, q_norm=None, k_norm=None) for layer in weights.layers)
        return spec, replace(weights, layers=layers)
    if change == "biases":
        return spec, replace(weights, layers=tuple(map(with_biases, weights.layers)))
    if change == "norms in float32":  # as of files that hold them less one
        layers = tuple(
            replace(each, mlp_norm=1 + each.mlp_norm.float() / 3) for each in weights.layers
        )
        return spec, replace(weights, layers=layers)
    if change == "part of a head is turned":
        return replace(spec, rotary_dim=32), weights
    windows, cap = ((0, 0, 0), 3.0) if change == "cap" else ((20, 0, 33), 0.0)
    spec = replace(spec, attention=replace(spec.attention, windows=windows, soft_cap=cap))
    if change == "windows with a rotation of their own":
        spec = replace(spec, local_rope=replace(spec.rope, theta=7.0))
    return spec, weights


def use(runner, spec, weights):
    old = parts_of(runner.decoder)
    attention = type(old.attention)(runner.pool, spec.attention)
    fused_pass = decode_pass(spec, weights, runner.pool.tensor)
    assert fused_pass is not None
    runner.decoder = Decoder(spec, weights, attention, old.gating, old.norms, fused_pass)


@pytest.mark.parametrize(
    "change",
    [
        "no norms",
        "biases",
        "norms in float32",
        "windows",
        "windows with a rotation of their own",
        "cap",
        "part of a head is turned",
    ],
)
def test_other_shapes_of_a_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    runner = build_runner(folder, EngineOptions(blocks=BLOCKS, block_size=SIZE))
    runner.pool.tensor.normal_()
    parts = parts_of(runner.decoder)
    plain = both_ways(runner, slices())[0][0]
    use(runner, *changed(parts.spec, parts.weights, change))
    found = both_ways(runner, slices())
    assert_same(found)
    assert not torch.equal(found[0][0], plain)  # the change counts


def test_steps_that_it_does_not_know_go_layer_by_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build_runner(folder, EngineOptions(blocks=BLOCKS, block_size=SIZE))
    parts = parts_of(runner.decoder)
    runner.all_logits(StepBatch(tuple(slices([0, 0]))))
    monkeypatch.setattr(DecodePass, "__call__", None)
    monkeypatch.setattr(module, "_MAX_ROWS", 1)
    runner.all_logits(StepBatch(tuple(slices([0, 0]))))
    monkeypatch.undo()
    use(runner, replace(parts.spec, rotary_dim=48), parts.weights)  # no multiple of 32
    monkeypatch.setattr(DecodePass, "__call__", None)
    runner.all_logits(StepBatch(tuple(slices([0, 0]))))


def test_a_decoder_of_fewer_layers_does_not_use_it(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = runner.decoder.shortened()
    assert len(parts_of(short).weights.layers) == 1
    with monkeypatch.context() as patch:
        patch.setattr(runner, "decoder", short)
        patch.setattr(DecodePass, "__call__", None)
        assert torch.cat(runner.all_hidden(StepBatch(tuple(slices())))).isfinite().all()


def test_a_sequence_that_is_not_finite_leaves_the_others_alone(runner: ModelRunner) -> None:
    before = runner.pool.tensor.clone()
    expected = runner.all_logits(StepBatch(tuple(slices())))
    runner.pool.tensor[slices()[4].blocks[0]] = torch.nan
    batch = StepBatch(tuple(replace(each, draws=GREEDY) for each in slices()))
    found, result = runner.all_logits(StepBatch(tuple(slices()))), runner.run(batch)
    runner.pool.tensor.copy_(before)
    assert result.broken == {4} and found[4].isnan().any()
    for index in (0, 1, 2, 3, 5):
        assert torch.equal(found[index], expected[index])


def test_a_token_is_fed_from_the_step_before(runner: ModelRunner) -> None:
    """A step that is planned before the draws of the one before it are known."""
    before, drawn = runner.pool.tensor.clone(), []
    first = [replace(each, draws=GREEDY) for each in slices()]
    for fused_pass in (parts_of(runner.decoder).fused_pass, None):
        runner.pool.tensor.copy_(before)
        with with_fused_pass(runner.decoder, fused_pass):
            reported = runner.run(StepBatch(tuple(first)))
            free = sorted({*range(BLOCKS)}.difference(*(each.blocks for each in first)))
            after = [
                Slice([0], each.start + 1, [*each.blocks, free[n]], GREEDY, feed=n)
                for n, each in enumerate(first)
            ]
            if fused_pass is None:  # the tokens themselves
                after = [
                    replace(each, tokens=[reported.drawn[n][0].token], feed=None)
                    for n, each in enumerate(after)
                ]
            drawn.append((reported.drawn, runner.run(StepBatch(tuple(after))).drawn))
    runner.pool.tensor.copy_(before)
    assert drawn[0] == drawn[1] and all(drawn[0][1])


def test_it_is_compiled_before_the_first_step(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = list(module.through_layers.signatures)
    runner.all_logits(StepBatch(tuple(slices())))
    assert known and list(module.through_layers.signatures) == known
