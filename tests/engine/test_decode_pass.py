"""A decode step in one compiled call against the same step layer by layer: bit for bit, in the
hidden states and in the pool."""

import random
from dataclasses import replace

import pytest
import torch

import baton.engine.decode_pass as module
from baton.engine.batch import Slice, StepBatch
from baton.engine.decode_pass import decode_pass
from baton.engine.dot_bf16 import supported
from baton.engine.linear_numba import can_pack
from baton.engine.loading import build_runner
from baton.engine.spec import read_spec
from baton.engine.weights import load_weights
from baton.models.random_model import make_shaped_model

pytestmark = pytest.mark.skipif(
    not supported() or not can_pack(torch.zeros(64, 64, dtype=torch.bfloat16)),
    reason="needs AVX-512 BF16 and no matrix unit",
)
BLOCKS, SIZE, VOCAB = 40, 16, 256
STARTS = [0, 1, 15, 16, 40, 63]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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
def runner(folder):
    made = build_runner(folder, blocks=BLOCKS, block_size=SIZE)
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


def both_ways(runner, monkeypatch, items):
    """(logits, pool) with the pass, and without it."""
    before, found = runner.pool.tensor.clone(), []
    for whole in (runner.decoder._whole, None):
        runner.pool.tensor.copy_(before)
        with monkeypatch.context() as patch:
            patch.setattr(runner.decoder, "_whole", whole)
            logits = torch.cat(runner.all_logits(StepBatch(tuple(items))))
        found.append((logits, runner.pool.tensor.clone()))
    runner.pool.tensor.copy_(before)
    return found


def assert_same(found):
    (logits, pool), (expected, expected_pool) = found
    assert logits.isfinite().all()
    assert torch.equal(logits, expected) and torch.equal(pool, expected_pool)


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_it_gives_the_bits_of_the_layers(runner, monkeypatch, rows):
    assert_same(both_ways(runner, monkeypatch, slices()[:rows]))


def test_more_rows_than_a_tile_has(runner, monkeypatch):
    assert_same(both_ways(runner, monkeypatch, slices([n % 16 for n in range(8)])))


def test_two_threads(runner, monkeypatch):
    alone = both_ways(runner, monkeypatch, slices())[0]
    torch.set_num_threads(2)
    try:
        found = both_ways(runner, monkeypatch, slices())
    finally:
        torch.set_num_threads(1)
    assert_same(found)
    assert torch.equal(found[0][0], alone[0])


def test_two_tokens_of_one_sequence_see_each_other(runner, monkeypatch):
    """All of a layer's KV is written before any of it is read."""
    table = slices()[4].blocks
    items = [Slice([5], 41, table), Slice([9], 40, table)]
    found = both_ways(runner, monkeypatch, items)
    assert_same(found)
    other = both_ways(runner, monkeypatch, [items[0], Slice([8], 40, table)])
    assert not torch.equal(found[0][0][0], other[0][0][0])


def test_it_is_what_decode_steps_run(runner, monkeypatch):
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
def loaded(folder):
    spec = read_spec(folder)
    return spec, load_weights(folder, spec, torch.bfloat16)


def with_layer(weights, **changed):
    return replace(weights, layers=(*weights.layers[:-1], replace(weights.layers[-1], **changed)))


def test_layers_that_it_does_not_know_are_left_to_the_decoder(loaded, runner):
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


@pytest.mark.parametrize("change", ["no norms", "windows", "cap", "part of a head is turned"])
def test_other_shapes_of_a_layer(folder, monkeypatch, change):
    runner = build_runner(folder, blocks=BLOCKS, block_size=SIZE)
    runner.pool.tensor.normal_()
    decoder = runner.decoder
    spec, weights = decoder._spec, decoder._weights
    if change == "no norms":
        layers = tuple(replace(layer, q_norm=None, k_norm=None) for layer in weights.layers)
        weights = replace(weights, layers=layers)
    elif change == "part of a head is turned":
        spec = replace(spec, rotary_dim=32)
    else:
        windows, cap = ((20, 0, 33), 0.0) if change == "windows" else ((0, 0, 0), 3.0)
        attention = replace(spec.attention, windows=windows, soft_cap=cap)
        spec = replace(spec, attention=attention)
    made = type(decoder)(
        spec,
        weights,
        type(decoder._attention)(runner.pool, spec.attention),
        decoder._gating,
        decoder._norms,
        decode_pass(spec, weights, runner.pool.tensor),
    )
    runner.decoder = made
    assert_same(both_ways(runner, monkeypatch, slices()))


def test_it_is_compiled_before_the_first_step(runner, monkeypatch):
    known = list(module._through_layers.signatures)
    runner.all_logits(StepBatch(tuple(slices())))
    assert known and list(module._through_layers.signatures) == known
