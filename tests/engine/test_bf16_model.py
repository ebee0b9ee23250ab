"""A whole bfloat16 model on the compiled kernels, against the same model on plain torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.engine.cpu.decode_pass import DecodePass
from baton.engine.cpu.dot_bf16 import has_matrix_unit, supported
from baton.engine.cpu.linear_numba import Panels
from baton.engine.cpu.row_kernels import NumbaNorms, silu_gate
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.model.linear import bfloat16_is_fast
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.models.random_model import make_shaped_model
from baton.runtime.sampling import SamplingParams
from tests.support.decoder_probe import parts_of
from tests.support.processors import PROCESSORS, pretend_processor, without_matrix_unit

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
BLOCKS, SIZE, VOCAB = 64, 16, 4096
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shaped_model(
        tmp_path_factory.mktemp("bf16"),
        layers=2,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=192,
        vocab=VOCAB,
        dtype="bfloat16",
        seed=3,
    )


def runner(folder, **how):
    made = build_runner(folder, EngineOptions(blocks=BLOCKS, block_size=SIZE, **how))
    made.pool.tensor.fill_(float("nan"))
    return made


@pytest.fixture(scope="module", params=["as detected", "no matrix unit"])
def fast(folder: Path, request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    """The kernels of this processor; where it has AMX, in turn those of one that has none."""
    if request.param == "as detected":
        yield runner(folder)
        return
    if not has_matrix_unit():
        pytest.skip("the same as detected")
    with pytest.MonkeyPatch.context() as patch:
        without_matrix_unit(patch)
        yield runner(folder)


@pytest.fixture(scope="module")
def plain(folder: Path) -> ModelRunner:
    """Weights widened to float32, on plain torch: what rounding is measured against."""
    return runner(folder, dtype="float32", backend="torch")


def prompt(length, seed=0):
    return random.Random(seed).choices(range(VOCAB), k=length)


def blocks(seed=0):
    return random.Random(seed).sample(range(BLOCKS), 12)


def logits(runner, *slices):
    return torch.cat(runner.all_logits(StepBatch(slices)))


def test_the_compiled_parts_are_in_use(fast: ModelRunner) -> None:
    parts = parts_of(fast.decoder)
    assert isinstance(parts.norms, NumbaNorms)
    assert parts.gating is silu_gate
    assert parts.attention.bfloat_pool is not None  # `BfloatAttention` reads it


@pytest.mark.parametrize("kind", ["AVX2", "AVX-512", "AVX-512 BF16", "AMX"])
def test_each_kind_of_processor_has_its_products(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if not bfloat16_is_fast() and PROCESSORS[kind].bfloat16_is_fast:
        pytest.skip("oneDNN packs no bfloat16 here")
    pretend_processor(monkeypatch, kind)
    parts = parts_of(runner(folder).decoder)
    packs = kind in ("AVX2", "AVX-512 BF16")
    assert isinstance(parts.weights.layers[0].output.product, Panels) == packs
    assert isinstance(parts.fused_pass, DecodePass) == packs


@pytest.mark.parametrize("length", [1, 2, 50, 130])
def test_logits_are_those_of_float32_up_to_rounding(
    fast: ModelRunner, plain: ModelRunner, length: int
) -> None:
    item = Slice(prompt(length), 0, blocks())
    found, expected = logits(fast, item), logits(plain, item)
    allowed = 0.06 * expected[:, :1000].std()  # ids above the tokenizer's have a constant bias
    assert (found - expected).square().mean().sqrt() < allowed
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.7


def test_whole_chunked_and_one_by_one_agree(fast: ModelRunner) -> None:
    tokens, table = prompt(70, seed=4), blocks(4)
    whole = logits(fast, Slice(tokens, 0, table))
    spread = whole[:, :1000].std()
    parts = []
    for first, end in ((0, 33), (33, 64), (64, 65), (65, 66), (66, 70)):
        parts.append(logits(fast, Slice(tokens[first:end], first, table)))
    assert (torch.cat(parts) - whole).square().mean().sqrt() < 0.06 * spread


def test_a_decode_row_is_the_same_bits_in_any_batch(fast: ModelRunner) -> None:
    starts = [5, 16, 31, 80]
    tables = [
        random.Random(9).sample(range(BLOCKS), BLOCKS)[12 * i : 12 * i + 12] for i in range(4)
    ]
    for start, table in zip(starts, tables, strict=True):
        logits(fast, Slice(prompt(start, start), 0, table))
    slices = [Slice([7 + n], starts[n], tables[n]) for n in range(4)]
    together = logits(fast, *slices)
    for row, item in enumerate(slices):
        assert torch.equal(logits(fast, item)[0], together[row])


def test_draws_of_a_mixed_batch(fast: ModelRunner) -> None:
    """Decode rows, a chunk that draws, and one that does not, in one step."""
    first, second, third = (random.Random(2).sample(range(BLOCKS), 36)[i::3] for i in range(3))
    logits(fast, Slice(prompt(20), 0, first))
    items = (
        Slice(prompt(40, 1), 0, second, (Draw(0, 40, GREEDY), Draw(1, 40, GREEDY))),
        Slice([9], 20, first, (Draw(0, 21, GREEDY),)),
        Slice(prompt(17, 2), 0, third),
    )
    result = fast.run(StepBatch(items))
    assert [len(drawn) for drawn in result.drawn] == [2, 1, 0]
    assert not result.broken
    rows = fast.all_logits(StepBatch(items))
    assert {drawn.token for drawn in result.drawn[0]} == {int(rows[0][-1].argmax())}
    assert result.drawn[1][0].token == int(rows[1][-1].argmax())


def test_a_sequence_over_bad_kv_is_broken_alone(fast: ModelRunner) -> None:
    good, bad = (random.Random(6).sample(range(BLOCKS), 24)[i::2] for i in range(2))
    for table in (good, bad):
        logits(fast, Slice(prompt(30), 0, table))
    fast.pool.tensor[bad[1], 0, 1, 1, 3] = float("nan")
    draw = (Draw(0, 31, GREEDY),)
    result = fast.run(StepBatch((Slice([1], 30, bad, draw), Slice([1], 30, good, draw))))
    assert result.broken == {0}
    assert [len(drawn) for drawn in result.drawn] == [0, 1]
