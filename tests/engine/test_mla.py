"""Latent attention against keys and values written out for every head, on random pools."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from baton.engine.cpu.linear import CpuMatrix
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import FP8_E4M3, INT8, KvQuant
from baton.engine.model import mla as latent
from baton.engine.model.mla import (
    LatentAttention,
    LatentWeights,
    absorb,
    expand_values,
    expansion_pays,
)
from baton.engine.model.rope import Rotary
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import read_spec
from baton.engine.spec.moe_spec import LatentSpec
from baton.engine.spec.rope_spec import RopeSpec
from tests.support.small_models import Reference

BLOCKS, SIZE, HEADS, HIDDEN, LAYER = 40, 8, 4, 64, 1
SPEC = LatentSpec(32, 8, 12, 16, query_rank=None, interleaved=True)
SCALE = 0.3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def pool(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> KvPool:
    torch.manual_seed(4)
    pool = KvPool(read_spec(references("deepseek-v2").folder), BLOCKS, SIZE, request.param)
    pool.tensor.normal_()
    return pool


@pytest.fixture
def up(pool: KvPool) -> torch.Tensor:
    torch.manual_seed(9)
    return (torch.randn(HEADS, 12 + 16, 32) / 6).to(pool.tensor.dtype)


def attention(pool, spec=SPEC):
    return LatentAttention(pool, spec, HEADS, SCALE)


def step(*slices):
    return lay_out(StepBatch(slices), Bounds(BLOCKS, SIZE, 199, 512))


def table(tokens, order=None):
    order = order or torch.randperm(BLOCKS).tolist()
    return [order.pop() for _ in range(-(-tokens // SIZE))]


def written_out(pool, query, blocks, length, up):
    """query [heads, query_dim] over the first `length` tokens of `blocks`, in float64."""
    rows = pool.tensor[blocks][:, 0, LAYER].double().flatten(0, 1)[:length]
    latent, shared = rows[:, :32], rows[:, 32:]
    out = torch.empty(HEADS, 16, dtype=torch.float64)
    for head in range(HEADS):
        pairs = latent @ up[head].double().T
        keys = torch.cat((pairs[:, :12], shared), dim=1)
        weights = (keys @ query[head].double() * SCALE).softmax(dim=0)
        out[head] = weights @ pairs[:, 12:]
    return out


@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 100])
def test_decode_is_attention_written_out(pool: KvPool, up: torch.Tensor, start: int) -> None:
    blocks = table(start + 1)
    queries = torch.randn(1, HEADS, SPEC.query_dim).to(pool.tensor.dtype)
    out = attention(pool).attend(LAYER, queries, up, step(Slice([1], start, blocks)))
    assert out.dtype == queries.dtype
    expected = written_out(pool, queries[0], blocks, start + 1, up)
    tolerance = TOLERANCE[pool.tensor.dtype]
    torch.testing.assert_close(out[0].double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("start", [0, 5, 8, 50])
@pytest.mark.parametrize("rows", [2, 11, 20])  # at 50, 20 are expanded and 11 are not
def test_chunk_is_attention_written_out(
    pool: KvPool, up: torch.Tensor, rows: int, start: int
) -> None:
    blocks = table(start + rows)
    queries = torch.randn(rows, HEADS, SPEC.query_dim).to(pool.tensor.dtype)
    out = attention(pool).attend(LAYER, queries, up, step(Slice([1] * rows, start, blocks)))
    tolerance = TOLERANCE[pool.tensor.dtype]
    for row in range(rows):
        expected = written_out(pool, queries[row], blocks, start + row + 1, up)
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rows", [11, 20])
def test_memory_is_bounded_by_computing_in_parts(
    pool: KvPool, up: torch.Tensor, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few heads at a time where a chunk is expanded, a few rows where it is absorbed."""
    blocks = table(50 + rows)
    queries = torch.randn(rows, HEADS, SPEC.query_dim).to(pool.tensor.dtype)
    layout = step(Slice([1] * rows, 50, blocks))
    whole = attention(pool).attend(LAYER, queries, up, layout)
    monkeypatch.setattr(latent, "_EXPANDED_NUMBERS", 3 * 70 * 28)  # three heads, then one
    monkeypatch.setattr(latent, "_MASK_NUMBERS", 2 * HEADS * 61)  # two rows
    parts = attention(pool).attend(LAYER, queries, up, layout)
    tolerance = 1e-6 if pool.tensor.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(parts, whole, rtol=0, atol=tolerance)


def mixed_step():
    order = torch.randperm(BLOCKS).tolist()
    lengths = [(1, 0), (1, 8), (1, 40), (5, 3), (30, 9)]
    return [Slice([1] * n, start, table(start + n, order)) for n, start in lengths]


def test_a_sequence_does_not_depend_on_the_batch_beyond_rounding(
    pool: KvPool, up: torch.Tensor
) -> None:
    slices = mixed_step()
    layout = step(*slices)
    queries = torch.randn(len(layout.tokens), HEADS, SPEC.query_dim).to(pool.tensor.dtype)
    ours = attention(pool)
    together = ours.attend(LAYER, queries, up, layout)
    for item, (first, end) in zip(slices, layout.spans, strict=True):
        alone = ours.attend(LAYER, queries[first:end], up, step(item))
        tolerance = 1e-6 if pool.tensor.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(alone, together[first:end], rtol=0, atol=tolerance)


def test_tokens_beyond_the_length_do_not_matter_even_as_nan(pool: KvPool, up: torch.Tensor) -> None:
    slices = mixed_step()
    layout = step(*slices)
    queries = torch.randn(len(layout.tokens), HEADS, SPEC.query_dim).to(pool.tensor.dtype)
    ours = attention(pool)
    before = ours.attend(LAYER, queries, up, layout)
    used = torch.zeros(BLOCKS, SIZE, dtype=torch.bool)
    for item in slices:
        for position in range(item.start + len(item.tokens)):
            used[item.blocks[position // SIZE], position % SIZE] = True
    pool.tensor.masked_fill_(~used[:, None, None, :, None], float("nan"))
    assert torch.equal(ours.attend(LAYER, queries, up, layout), before)


def test_large_scores_do_not_overflow(pool: KvPool, up: torch.Tensor) -> None:
    layout = step(*mixed_step())
    queries = torch.full((len(layout.tokens), HEADS, SPEC.query_dim), 1e4).to(pool.tensor.dtype)
    assert attention(pool).attend(LAYER, queries, up, layout).isfinite().all()


def test_write_touches_its_tokens_alone(pool: KvPool) -> None:
    before = pool.tensor.clone()
    layout = step(Slice([1, 1, 1], 6, [3, 5]), Slice([1], 2, [9]))
    rows = torch.randn(4, SPEC.width).to(pool.tensor.dtype)
    attention(pool).write(LAYER, rows, layout)
    for row, (block, token) in enumerate([(9, 2), (3, 6), (3, 7), (5, 0)]):
        assert torch.equal(pool.tensor[block, 0, LAYER, token], rows[row])
        pool.tensor[block, 0, LAYER, token] = before[block, 0, LAYER, token]
    assert torch.equal(pool.tensor, before)


def test_absorbed_products_are_those_of_keys_and_values(up: torch.Tensor) -> None:
    up = up.float()
    queries, rows = torch.randn(3, HEADS, SPEC.query_dim), torch.randn(7, SPEC.width)
    pairs = torch.einsum("tr,hpr->thp", rows[:, :32], up)
    keys = torch.cat((pairs[..., :12], rows[:, None, 32:].expand(-1, HEADS, -1)), dim=-1)
    expected = torch.einsum("qhd,thd->qht", queries, keys)
    torch.testing.assert_close(absorb(SPEC, queries, up) @ rows.T, expected, rtol=0, atol=1e-4)
    weights = torch.randn(3, HEADS, 7)
    expected = torch.einsum("qht,thv->qhv", weights, pairs[..., 12:])
    torch.testing.assert_close(expand_values(SPEC, weights @ rows, up), expected, rtol=0, atol=1e-4)


def plain_weights(query_rank=None):
    torch.manual_seed(2)
    queries = HEADS * SPEC.query_dim
    return LatentWeights(
        inputs=CpuMatrix(torch.randn((query_rank or queries) + SPEC.width, HIDDEN) / 8),
        query_norm=torch.rand(query_rank) + 0.5 if query_rank else None,
        query_up=CpuMatrix(torch.randn(queries, query_rank) / 5) if query_rank else None,
        latent_norm=torch.rand(32) + 0.5,
        up=torch.randn(HEADS, 28, 32) / 6,
    )


@pytest.mark.parametrize("query_rank", [None, 24])
@pytest.mark.parametrize("interleaved", [True, False])
def test_products_depend_on_the_distance_of_positions_alone(
    references: Callable[[str], Reference], query_rank: int | None, interleaved: bool
) -> None:
    """What rotation is for: moved by 7 positions together, a sequence's output stays."""
    pool = KvPool(read_spec(references("deepseek-v2").folder), BLOCKS, SIZE)
    ours = attention(pool, LatentSpec(32, 8, 12, 16, query_rank, interleaved))
    weights, x = plain_weights(query_rank), torch.randn(9, HIDDEN)
    layout, rotary = step(Slice([1] * 9, 0, table(9))), Rotary(RopeSpec("default", 1e4), 8)

    def output(positions):
        angles = rotary.angles(positions, torch.float32)
        return ours(LAYER, weights, x, angles, layout)

    here, moved = output(torch.arange(9)), output(torch.arange(9) + 7)
    torch.testing.assert_close(here, moved, rtol=0, atol=1e-5)
    assert not torch.allclose(here, output(torch.arange(9) * 2), atol=1e-3)


def test_neighbours_and_halves_turn_by_the_same_angles(
    references: Callable[[str], Reference],
) -> None:
    """An interleaved model equals one whose rotated rows are sorted into halves."""
    pool = KvPool(read_spec(references("deepseek-v2").folder), BLOCKS, SIZE)
    rows = torch.randn(HEADS * SPEC.query_dim + SPEC.width, HIDDEN) / 8
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    sorted_rows = rows.clone()
    for head in range(HEADS):
        part = slice(head * 20 + 12, head * 20 + 20)
        sorted_rows[part] = rows[part][order]
    sorted_rows[-8:] = rows[-8:][order]
    x, layout = torch.randn(9, HIDDEN), step(Slice([1] * 9, 0, table(9)))
    angles = Rotary(RopeSpec("default", 1e4), 8).angles(torch.arange(9), torch.float32)
    outputs = []
    for matrix, interleaved in ((rows, True), (sorted_rows, False)):
        weights = LatentWeights(CpuMatrix(matrix), None, None, torch.ones(32), plain_weights().up)
        spec = LatentSpec(32, 8, 12, 16, None, interleaved)
        outputs.append(attention(pool, spec)(LAYER, weights, x, angles, layout))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


V3 = LatentSpec(512, 64, 128, 128, 1536, interleaved=True)


@pytest.mark.parametrize("spec", [SPEC, V3], ids=["small", "v3"])
@pytest.mark.parametrize("tokens", [300, 5000])
def test_expansion_pays_where_its_multiplications_are_fewer(spec: LatentSpec, tokens: int) -> None:
    both = []
    for rows in range(2, 301):
        product = spec.rank * (spec.plain_dim + spec.value_dim)
        absorbed = rows * tokens * (2 * spec.rank + spec.rope_dim) + rows * product
        expanded = rows * tokens * (spec.query_dim + spec.value_dim) + tokens * product
        both.append(expansion_pays(spec, rows, tokens))
        assert both[-1] == (expanded <= absorbed)
    assert set(both) == {True, False}


def test_a_whole_prompt_is_expanded_and_a_short_end_is_not() -> None:
    assert expansion_pays(V3, 2, 2)
    assert expansion_pays(V3, 171, 1 << 17)
    assert not expansion_pays(V3, 170, 1 << 17)
    assert not expansion_pays(V3, 16, 1024)


def test_scale_is_the_one_given(pool: KvPool, up: torch.Tensor) -> None:
    blocks = table(9)
    queries = torch.randn(1, HEADS, SPEC.query_dim).to(pool.tensor.dtype)
    layout = step(Slice([1], 8, blocks))
    usual = LatentAttention(pool, SPEC, HEADS, 1 / math.sqrt(SPEC.query_dim))
    assert not torch.allclose(
        usual.attend(LAYER, queries, up, layout),
        attention(pool).attend(LAYER, queries, up, layout),
        atol=1e-3,
    )


@pytest.mark.parametrize(("codes", "bound"), [(INT8, 0.5 / 127), (FP8_E4M3, 1 / 16)])
def test_latent_and_key_are_coded_apart(
    references: Callable[[str], Reference], codes: KvQuant, bound: float
) -> None:
    """Each within its own scale, however large the other is; what is written stays as it is."""
    pool = KvPool(read_spec(references("deepseek-v2").folder), BLOCKS, SIZE, quant=codes)
    layout, rows = step(Slice([1] * 11, 0, [7, 3])), torch.randn(11, SPEC.width)
    rows[:, SPEC.rank :] *= 1000
    ours = attention(pool)
    ours.write(LAYER, rows, layout)
    found = ours.latents(LAYER, torch.tensor([7, 3]), 11)
    assert found.shape == rows.shape and found.dtype == torch.float32
    for part in (slice(0, SPEC.rank), slice(SPEC.rank, None)):
        most = rows[:, part].abs().amax(-1, keepdim=True)
        assert ((found[:, part] - rows[:, part]).abs() <= bound * most).all()
    before = pool.memory.clone()
    ours.write(LAYER, rows, layout)
    assert torch.equal(pool.memory, before)
    others = [block for block in range(BLOCKS) if block not in (3, 7)]
    assert not pool.memory[others].any()


def test_attention_over_kv_quant_equals_that_over_its_numbers(
    references: Callable[[str], Reference], up: torch.Tensor
) -> None:
    if up.dtype != torch.float32:
        pytest.skip("the numbers of codes are float32")
    spec = read_spec(references("deepseek-v2").folder)
    coded, plain = KvPool(spec, BLOCKS, SIZE, quant=INT8), KvPool(spec, BLOCKS, SIZE)
    blocks = table(60)
    first = step(Slice([1] * 50, 0, blocks))
    attention(coded).write(LAYER, torch.randn(50, SPEC.width), first)
    attention(plain).write(LAYER, attention(coded).latents(LAYER, torch.tensor(blocks), 50), first)
    for item in (Slice([1] * 50, 0, blocks), Slice([1] * 3, 47, blocks), Slice([1], 49, blocks)):
        queries = torch.randn(len(item.tokens), HEADS, SPEC.query_dim)
        found, wanted = (
            attention(p).attend(LAYER, queries, up, step(item)) for p in (coded, plain)
        )
        assert torch.equal(found, wanted)


def test_a_latent_that_is_no_number_stays_none(references: Callable[[str], Reference]) -> None:
    pool = KvPool(read_spec(references("deepseek-v2").folder), BLOCKS, SIZE, quant=INT8)
    rows = torch.randn(2, SPEC.width)
    rows[1, SPEC.rank + 1] = float("nan")
    attention(pool).write(LAYER, rows, step(Slice([1, 1], 0, [5])))
    found = attention(pool).latents(LAYER, torch.tensor([5]), 2)
    assert found[0].isfinite().all() and found[1, : SPEC.rank].isfinite().all()
    assert found[1, SPEC.rank :].isnan().all()
