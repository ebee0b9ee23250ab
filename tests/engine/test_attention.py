"""The backends against each other and against attention written out, on random pools."""

from __future__ import annotations

import math

import pytest
import torch

from baton.engine.cpu.attention_numba import NumbaAttention
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import TorchAttention
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec, read_spec
from tests.support.small_models import Reference

BACKENDS = [TorchAttention, NumbaAttention]
BLOCKS, SIZE, DIM = 40, 8, 32
PLAIN = AttentionSpec(scale=1 / math.sqrt(DIM), windows=(0, 0, 0))
SPECS = {
    "plain": PLAIN,
    "windows": AttentionSpec(scale=0.3, windows=(0, 3, 11)),
    "soft cap": AttentionSpec(scale=0.3, windows=(0, 0, 0), soft_cap=1.5),
    "both": AttentionSpec(scale=0.3, windows=(0, 12, 4), soft_cap=0.7),
}
STARTS = [0, 1, 6, 7, 8, 9, 100]  # around the borders of blocks


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def pool(request: pytest.FixtureRequest, qwen3: Reference) -> KvPool:
    torch.manual_seed(4)
    pool = KvPool(read_spec(qwen3.folder), BLOCKS, SIZE, request.param)
    pool.tensor.normal_()
    return pool


def bounds():
    return Bounds(BLOCKS, SIZE, 199, 512)


def decode_layout():
    order = torch.randperm(BLOCKS).tolist()
    slices = []
    for start in STARTS:
        slices.append(Slice([1], start, [order.pop() for _ in range(start // SIZE + 1)]))
    return lay_out(StepBatch(tuple(slices)), bounds()), slices


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> AttentionSpec:
    return SPECS[request.param]


def written_out(pool, spec, layer, query, blocks, length):
    """query [heads, dim] over the first `length` tokens of `blocks`, or those of them that are
    in the window, in float64."""
    first = max(0, length - spec.windows[layer]) if spec.windows[layer] else 0
    kv = pool.tensor[blocks][:, :, layer].double()  # [block, head, 2, token, dim]
    keys, values = kv.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, first:length]
    keys, values = (x.repeat_interleave(query.shape[0] // 2, dim=0) for x in (keys, values))
    scores = (keys @ query.double()[:, :, None])[..., 0] * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    return (scores.softmax(dim=-1)[:, None] @ values)[:, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_is_attention_written_out(pool: KvPool, spec: AttentionSpec, backend: type) -> None:
    layout, slices = decode_layout()
    queries = torch.randn(len(slices), 4, DIM).to(pool.tensor.dtype)
    out = backend(pool, spec).attend(1, queries, layout)
    assert out.dtype == queries.dtype
    tolerance = 1e-5 if pool.tensor.dtype == torch.float32 else 2e-2
    for row, item in enumerate(slices):
        expected = written_out(pool, spec, 1, queries[row], item.blocks, item.start + 1)
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("start", [0, 5, 8, 50])
def test_chunk_is_attention_written_out(
    pool: KvPool, spec: AttentionSpec, backend: type, start: int
) -> None:
    blocks = torch.randperm(BLOCKS)[: (start + 20) // SIZE + 1].tolist()
    layout = lay_out(StepBatch((Slice([1] * 20, start, blocks),)), bounds())
    queries = torch.randn(20, 4, DIM).to(pool.tensor.dtype)
    out = backend(pool, spec).attend(2, queries, layout)
    tolerance = 1e-5 if pool.tensor.dtype == torch.float32 else 3e-2
    for row in range(20):
        expected = written_out(pool, spec, 2, queries[row], blocks, start + row + 1)
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("length", [2, 8, 30])
def test_mixed_rows_of_float16(qwen3: Reference, spec: AttentionSpec, length: int) -> None:
    """Only the reference has float16: a chunk and two decodes in one step."""
    torch.manual_seed(6)
    pool = KvPool(read_spec(qwen3.folder), BLOCKS, SIZE, torch.float16)
    pool.tensor.normal_()
    order = torch.randperm(BLOCKS).tolist()
    starts = {0: length, length: 1, 3 * length: 1}  # start -> tokens
    slices = [
        Slice([1] * n, start, [order.pop() for _ in range(12)]) for start, n in starts.items()
    ]
    layout = lay_out(StepBatch(tuple(slices)), bounds())
    queries = torch.randn(length + 2, 4, DIM).to(torch.float16)
    out = TorchAttention(pool, spec).attend(2, queries, layout)
    for item, (first, end) in zip(slices, layout.spans, strict=True):
        for row in range(first, end):
            seen = item.start + row - first + 1
            expected = written_out(pool, spec, 2, queries[row], item.blocks, seen)
            torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=4e-3)


def test_a_window_reads_the_blocks_that_it_touches_and_no_others(pool: KvPool) -> None:
    """Blocks before the window may hold anything, in a chunk and in a decode."""
    attention = TorchAttention(pool, SPECS["windows"])
    blocks = torch.randperm(BLOCKS)[:8].tolist()
    for tokens in (1, 10):
        layout = lay_out(StepBatch((Slice([1] * tokens, 40, blocks),)), bounds())
        queries = torch.randn(tokens, 4, DIM).to(pool.tensor.dtype)
        before = attention.attend(2, queries, layout)
        assert before.isfinite().all()
        kept = pool.tensor.clone()
        pool.tensor[blocks[:3]] = float("nan")  # the window of token 40 begins at token 30
        assert torch.equal(attention.attend(2, queries, layout), before)
        pool.tensor.copy_(kept)
        pool.tensor[blocks[3], :, 2, 1, 30 % SIZE] += 1  # its first token counts
        assert not torch.equal(attention.attend(2, queries, layout), before)
        pool.tensor.copy_(kept)


def test_backends_agree_closely(pool: KvPool) -> None:
    layout, slices = decode_layout()
    queries = torch.randn(len(slices), 4, DIM).to(pool.tensor.dtype)
    one, two = (backend(pool, PLAIN).attend(0, queries, layout) for backend in BACKENDS)
    tolerance = 2e-6 if pool.tensor.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(one, two, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_beyond_the_length_do_not_matter_even_as_nan(pool: KvPool, backend: type) -> None:
    layout, slices = decode_layout()
    queries = torch.randn(len(slices), 4, DIM).to(pool.tensor.dtype)
    before = backend(pool, PLAIN).attend(0, queries, layout)
    used = torch.zeros(BLOCKS, SIZE, dtype=torch.bool)
    for item in slices:
        for position in range(item.start + 1):
            used[item.blocks[position // SIZE], position % SIZE] = True
    pool.tensor.masked_fill_(~used[:, None, None, None, :, None], float("nan"))
    assert torch.equal(backend(pool, PLAIN).attend(0, queries, layout), before)


def test_compiled_decode_does_not_depend_on_the_batch(pool: KvPool) -> None:
    layout, slices = decode_layout()
    queries = torch.randn(len(slices), 4, DIM).to(pool.tensor.dtype)
    attention = NumbaAttention(pool, PLAIN)
    together = attention.attend(0, queries, layout)
    for row, item in enumerate(slices):
        alone = lay_out(StepBatch((item,)), bounds())
        assert torch.equal(attention.attend(0, queries[row : row + 1], alone)[0], together[row])


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(pool: KvPool, backend: type) -> None:
    layout, slices = decode_layout()
    queries = torch.full((len(slices), 4, DIM), 1e4).to(pool.tensor.dtype)
    assert backend(pool, PLAIN).attend(0, queries, layout).isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_write_touches_its_tokens_alone(pool: KvPool, backend: type) -> None:
    before = pool.tensor.clone()
    batch = StepBatch((Slice([1, 1, 1], 6, [3, 5]), Slice([1], 2, [9])))
    layout = lay_out(batch, bounds())
    keys, values = torch.randn(2, 4, 2, DIM).to(pool.tensor.dtype)
    backend(pool, PLAIN).write(1, keys, values, layout)
    for row, (block, token) in enumerate([(9, 2), (3, 6), (3, 7), (5, 0)]):
        assert torch.equal(pool.tensor[block, :, 1, 0, token], keys[row])
        assert torch.equal(pool.tensor[block, :, 1, 1, token], values[row])
        pool.tensor[block, :, 1, :, token] = before[block, :, 1, :, token]
    assert torch.equal(pool.tensor, before)


@pytest.mark.parametrize(
    "backend",
    # numba compiles its kernels once more for these strides, which takes long
    [TorchAttention, pytest.param(NumbaAttention, marks=pytest.mark.nightly)],
)
def test_order_of_the_axes_may_change(pool: KvPool, backend: type) -> None:
    """The same values behind other strides: layer before head, as if so laid out."""
    layout, slices = decode_layout()
    queries = torch.randn(len(slices), 4, DIM).to(pool.tensor.dtype)
    before = backend(pool, PLAIN).attend(1, queries, layout)
    pool.tensor = pool.tensor.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(backend(pool, PLAIN).attend(1, queries, layout), before)
