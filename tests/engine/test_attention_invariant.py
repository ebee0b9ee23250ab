"""The invariant kernel against attention written out, and its bits against themselves."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from baton.engine.cpu.attention_invariant import InvariantAttention
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec
from baton.runtime.errors import ConfigError

BLOCKS, SIZE, KV_HEADS, HEADS, DIM, LENGTH = 60, 8, 2, 6, 20, 200
SPECS = {
    "plain": AttentionSpec(scale=0.2, windows=(0, 0)),
    "window": AttentionSpec(scale=0.2, windows=(0, 70)),
    "short-window": AttentionSpec(scale=0.2, windows=(0, 5)),
    "capped": AttentionSpec(scale=0.2, windows=(0, 0), soft_cap=3.0),
}


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> AttentionSpec:
    return SPECS[request.param]


@pytest.fixture(
    params=[
        pytest.param(torch.float32, id="float32"),
        pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.nightly),
    ]
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class Text:
    """One sequence of random keys, values and queries, put into pools of any block size."""

    def __init__(self, dtype, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.kv = torch.randn(LENGTH, KV_HEADS, 2, DIM, generator=generator).to(dtype)
        self.queries = torch.randn(LENGTH, HEADS, DIM, generator=generator).to(dtype)

    def stored(self, pool, blocks, length=LENGTH):
        for position in range(length):
            block, slot = blocks[position // pool.block_size], position % pool.block_size
            pool.tensor[block, :, 1, :, slot] = self.kv[position]


def make_pool(dtype, size=SIZE):
    tensor = torch.full((BLOCKS * SIZE // size, KV_HEADS, 2, 2, size, DIM), float("nan"))
    return SimpleNamespace(
        tensor=tensor.to(dtype), dtype=dtype, quant=None, block_size=size, blocks=len(tensor)
    )


def attend(pool, spec, *parts):
    """`parts` are (text, blocks, start, end). Returns the rows of each, [tokens, heads, dim]."""
    slices = [Slice([1] * (end - start), start, blocks) for _, blocks, start, end in parts]
    layout = lay_out(StepBatch(tuple(slices)), Bounds(pool.blocks, pool.block_size, 9, 999))
    queries = torch.empty(sum(end - start for *_, start, end in parts), HEADS, DIM)
    queries = queries.to(pool.tensor.dtype)
    for (text, _, start, end), (first, last) in zip(parts, layout.spans, strict=True):
        queries[first:last] = text.queries[start:end]
    out = InvariantAttention(pool, spec).attend(1, queries, layout)
    assert out.dtype == queries.dtype
    return [out[first:last] for first, last in layout.spans]


def shuffled(pool, seed):
    order = list(range(pool.blocks))
    random.Random(seed).shuffle(order)
    return order


def whole(text, dtype, spec):
    pool = make_pool(dtype)
    blocks = shuffled(pool, 1)[: LENGTH // SIZE]
    text.stored(pool, blocks)
    return attend(pool, spec, (text, blocks, 0, LENGTH))[0]


def written_out(text, spec):
    """[tokens, heads, dim] in float64."""
    keys, values = text.kv.double().permute(2, 1, 0, 3)  # [kv_head, tokens, dim]
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (keys, values))
    scores = torch.einsum("thd,hsd->hts", text.queries.double(), keys) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
    positions = torch.arange(LENGTH)
    hidden = positions > positions[:, None]
    if window := spec.windows[1]:
        hidden |= positions <= positions[:, None] - window
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("hts,hsd->thd", weights, values)


def test_is_attention_written_out(dtype: torch.dtype, spec: AttentionSpec) -> None:
    text = Text(dtype)
    exact = 3e-6 if dtype == torch.float32 else 1.6e-2
    found = whole(text, dtype, spec).double()
    torch.testing.assert_close(found, written_out(text, spec), rtol=0, atol=exact)


@pytest.mark.parametrize("seed", range(4))
def test_chunks_decodes_and_neighbours_change_no_bit(
    dtype: torch.dtype, spec: AttentionSpec, seed: int
) -> None:
    text, other = Text(dtype), Text(dtype, seed=9)
    expected = whole(text, dtype, spec)
    chooser = random.Random(seed)
    pool = make_pool(dtype)
    blocks = shuffled(pool, seed)
    mine, theirs = blocks[: LENGTH // SIZE], blocks[LENGTH // SIZE :]
    text.stored(pool, mine)
    other.stored(pool, theirs, length=100)
    start = 0
    while start < LENGTH:
        end = min(LENGTH, start + chooser.choice([1, 1, 2, 7, 33, 64, 90]))
        begin = chooser.randrange(99)
        parts = [
            (text, mine, start, end),
            (other, theirs, begin, chooser.randrange(begin + 1, 100)),
        ]
        index = chooser.randrange(2)
        found = attend(pool, spec, *(parts if index == 0 else reversed(parts)))[index]
        assert torch.equal(found, expected[start:end]), (start, end)
        start = end


@pytest.mark.parametrize("size", [1, 5, 16, 96])
def test_the_size_of_blocks_changes_no_bit(
    dtype: torch.dtype, spec: AttentionSpec, size: int
) -> None:
    text, pool = Text(dtype), make_pool(dtype, size)
    blocks = shuffled(pool, 2)[: -(-LENGTH // size)]
    text.stored(pool, blocks)
    assert torch.equal(attend(pool, spec, (text, blocks, 0, LENGTH))[0], whole(text, dtype, spec))


def test_threads_change_no_bit(dtype: torch.dtype, spec: AttentionSpec) -> None:
    text = Text(dtype)
    expected = whole(text, dtype, spec)
    torch.set_num_threads(2)
    try:
        assert torch.equal(whole(text, dtype, spec), expected)
    finally:
        torch.set_num_threads(1)


def test_a_token_that_is_not_finite_shows_from_its_place_on(spec: AttentionSpec) -> None:
    text = Text(torch.float32)
    expected = whole(text, torch.float32, spec)
    text.kv[100, 1, 0, 3] = float("nan")  # a key
    text.kv[150, 1, 1, 3] = float("inf")  # a value
    found = whole(text, torch.float32, spec)
    assert torch.equal(found[:100], expected[:100])
    assert torch.equal(found[:, :3], expected[:, :3])  # the other KV head's
    assert found[100:105, 3:].isnan().any(dim=-1).all()
    assert not found[150, 3:].isfinite().all(dim=-1).any()


def test_large_scores_do_not_overflow(spec: AttentionSpec) -> None:
    text = Text(torch.float32)
    text.queries *= 1e4
    assert whole(text, torch.float32, spec).isfinite().all()


def test_numbers_that_the_kernel_does_not_read_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"worker\.deterministic.* torch\.float16"):
        InvariantAttention(make_pool(torch.float16), SPECS["plain"])
