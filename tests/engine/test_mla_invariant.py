"""The strict form of latent attention against the usual one, and its bits against themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton.engine.deterministic.mla_invariant import InvariantLatentAttention
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.mla import LatentAttention
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec, read_spec
from baton.engine.spec.moe_spec import LatentSpec
from tests.support.small_models import Reference

BLOCKS, SIZE, HEADS = 40, 8, 4
SPEC = LatentSpec(32, 8, 12, 16, query_rank=None, interleaved=True)
ATTENTION = AttentionSpec(scale=0.3, windows=(0, 0, 0))


@pytest.fixture(
    params=[
        pytest.param(torch.float32, id="float32"),
        pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.nightly),
    ]
)
def pool(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> KvPool:
    torch.manual_seed(6)
    pool = KvPool(read_spec(references("deepseek-v2").folder), BLOCKS, SIZE, request.param)
    pool.tensor.normal_()
    return pool


def layout_of(*slices):
    return lay_out(StepBatch(slices), Bounds(BLOCKS, SIZE, 199, 512))


def some_slices():
    order = torch.randperm(BLOCKS).tolist()
    lengths = [(1, 0), (1, 40), (5, 3), (70, 9)]
    needed = [-(-(count + start) // SIZE) for count, start in lengths]
    return [
        Slice([1] * count, start, [order.pop() for _ in range(blocks)])
        for (count, start), blocks in zip(lengths, needed, strict=True)
    ]


def queries_and_up(pool, rows):
    queries = torch.randn(rows, HEADS, SPEC.query_dim).to(pool.tensor.dtype)
    return queries, (torch.randn(HEADS, 28, 32) / 6).to(pool.tensor.dtype)


def test_equals_the_usual_one_up_to_rounding(pool: KvPool) -> None:
    layout = layout_of(*some_slices())
    queries, up = queries_and_up(pool, len(layout.tokens))
    strict = InvariantLatentAttention(pool, SPEC, HEADS, ATTENTION)
    usual = LatentAttention(pool, SPEC, HEADS, ATTENTION.scale)
    tolerance = 1e-5 if pool.tensor.dtype == torch.float32 else 4e-2
    one, two = (each.attend(1, queries, up, layout) for each in (strict, usual))
    assert one.dtype == two.dtype
    torch.testing.assert_close(one, two, rtol=0, atol=tolerance)


def test_other_sequences_change_no_bit(pool: KvPool) -> None:
    slices = some_slices()
    layout = layout_of(*slices)
    queries, up = queries_and_up(pool, len(layout.tokens))
    strict = InvariantLatentAttention(pool, SPEC, HEADS, ATTENTION)
    together = strict.attend(0, queries, up, layout)
    for item, (first, end) in zip(slices, layout.spans, strict=True):
        alone = strict.attend(0, queries[first:end], up, layout_of(item))
        assert torch.equal(alone, together[first:end])


def test_chunks_change_no_bit(pool: KvPool) -> None:
    item = some_slices()[-1]
    queries, up = queries_and_up(pool, 70)
    strict = InvariantLatentAttention(pool, SPEC, HEADS, ATTENTION)
    whole = strict.attend(2, queries, up, layout_of(item))
    start = 0
    for count in (1, 2, 30, 1, 36):
        piece = Slice([1] * count, item.start + start, item.blocks)
        rows = slice(start, start + count)
        assert torch.equal(strict.attend(2, queries[rows], up, layout_of(piece)), whole[rows])
        start += count


def test_what_is_written_is_what_is_read(pool: KvPool) -> None:
    """The strict kernel sees the pool itself, not a copy."""
    strict = InvariantLatentAttention(pool, SPEC, HEADS, ATTENTION)
    item = Slice([1], 8, [3, 5])
    layout = layout_of(item)
    queries, up = queries_and_up(pool, 1)
    before = strict.attend(1, queries, up, layout)
    strict.write(1, torch.randn(1, SPEC.width).to(pool.tensor.dtype) * 3, layout)
    assert not torch.equal(strict.attend(1, queries, up, layout), before)
