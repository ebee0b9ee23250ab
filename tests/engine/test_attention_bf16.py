"""The bfloat16 kernels against `TorchAttention` in float32, on random pools and block tables."""

from __future__ import annotations

import pytest
import torch

import baton.engine.cpu.attention_bf16 as attention_bf16
import baton.engine.cpu.rotation_bf16 as rotation_bf16
from baton.engine.cpu.attention_bf16 import BfloatAttention, usable
from baton.engine.cpu.attention_bf16_invariant import InvariantBfloatAttention
from baton.engine.cpu.attention_numba import NumbaAttention
from baton.engine.cpu.dot_bf16 import supported
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import TorchAttention
from baton.engine.model.rope import rotate
from baton.engine.model.step_layout import Bounds, ChunkRows, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
BLOCKS, LAYERS = 30, 2
STARTS = [0, 1, 14, 15, 16, 17, 63, 64, 100]
# heads, KV heads, dim, block size, window, soft cap
SHAPES = {
    "plain": (4, 2, 64, 16, 0, 0.0),
    "wide-heads": (3, 3, 128, 16, 0, 0.0),
    "odd-group": (3, 1, 64, 32, 0, 0.0),
    "window": (4, 2, 64, 16, 21, 0.0),
    "window-and-cap": (2, 2, 64, 32, 40, 5.0),
}


class Pool(KvPool):
    """What the kernels use of one, for a tensor of any shape."""

    def __init__(self, tensor, block_size):
        self.tensor, self.block_size = tensor, block_size
        self.quant = self.scales = None


class Case:
    def __init__(self, name):
        torch.manual_seed(5)
        self.heads, kv_heads, self.dim, self.size, window, cap = SHAPES[name]
        shape = (BLOCKS, kv_heads, LAYERS, 2, self.size, self.dim)
        self.pool = Pool(torch.randn(shape).to(torch.bfloat16), self.size)
        self.spec = AttentionSpec(0.3, (window,) * LAYERS, cap)
        self.order = torch.randperm(BLOCKS).tolist()

    def fast(self):
        return BfloatAttention(self.pool, self.spec)

    def reference(self):
        return TorchAttention(Pool(self.pool.tensor.float(), self.size), self.spec)

    def queries(self, rows):
        return torch.randn(rows, self.heads, self.dim).to(torch.bfloat16)

    def decodes(self, starts=STARTS):
        slices = []
        for index, start in enumerate(starts):
            table = [self.order[(3 * index + i) % BLOCKS] for i in range(start // self.size + 1)]
            slices.append(Slice([1], start, table))
        return lay_out(StepBatch(tuple(slices)), Bounds(BLOCKS, self.size, 9, 480))

    def chunk(self, start, count):
        blocks = torch.tensor(self.order[: -(-(start + count) // self.size)])
        return ChunkRows(0, count, start, blocks)


@pytest.fixture(params=list(SHAPES))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def close(found, expected):
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=8e-3)


def decode(attention, queries, layout):
    return attention.decode(1, queries, layout.decode_tables, layout.decode_lengths)


def test_decode(case: Case) -> None:
    layout, queries = case.decodes(), case.queries(len(STARTS))
    found = decode(case.fast(), queries, layout)
    assert found.dtype == torch.bfloat16
    close(found, case.reference().decode(1, queries.float(), layout))


@pytest.mark.parametrize(
    ("start", "count"), [(0, 2), (0, 65), (7, 30), (64, 64), (90, 13), (1, 49)]
)
def test_chunk(case: Case, start: int, count: int) -> None:
    chunk, queries = case.chunk(start, count), case.queries(count)
    found = case.fast().chunk(0, queries, chunk)
    close(found, case.reference().chunk(0, queries.float(), chunk))


def test_rows_do_not_depend_on_the_batch_or_the_chunking(case: Case) -> None:
    layout, queries = case.decodes(), case.queries(len(STARTS))
    fast = case.fast()
    together = decode(fast, queries, layout)
    for row in range(len(STARTS)):
        table, length = layout.decode_tables[row : row + 1], layout.decode_lengths[row : row + 1]
        assert torch.equal(fast.decode(1, queries[row : row + 1], table, length)[0], together[row])
    queries = case.queries(80)
    whole = fast.chunk(0, queries, case.chunk(0, 80))
    close(fast.chunk(0, queries[:50], case.chunk(0, 50)), whole[:50].float())
    close(fast.chunk(0, queries[50:], case.chunk(50, 30)), whole[50:].float())


def test_what_was_never_written_does_not_matter(case: Case) -> None:
    """Even as NaN: the tokens after the last one, in its block and in others."""
    layout, queries = case.decodes([20]), case.queries(1)
    chunk, more = case.chunk(0, 21), case.queries(21)
    fast = case.fast()
    before = decode(fast, queries, layout), fast.chunk(1, more, chunk)
    used = torch.zeros(BLOCKS, case.size, dtype=torch.bool)
    for table in (layout.decode_tables[0].tolist(), chunk.blocks.tolist()):
        for position in range(21):
            used[table[position // case.size], position % case.size] = True
    case.pool.tensor.masked_fill_(~used[:, None, None, None, :, None], float("nan"))
    after = decode(fast, queries, layout), fast.chunk(1, more, chunk)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def test_a_value_that_is_not_finite_is_seen(case: Case) -> None:
    """It must reach the check for broken slices, not vanish."""
    layout, queries = case.decodes([30]), case.queries(1)
    case.pool.tensor[layout.decode_tables[0, 30 // case.size], :, 1, 0, 30 % case.size] = torch.nan
    assert not decode(case.fast(), queries, layout).isfinite().any()


def test_large_scores_do_not_overflow(case: Case) -> None:
    queries = torch.full((len(STARTS), case.heads, case.dim), 1e4).to(torch.bfloat16)
    assert decode(case.fast(), queries, case.decodes()).isfinite().all()
    assert case.fast().chunk(0, queries, case.chunk(3, len(STARTS))).isfinite().all()


def test_queries_and_pool_may_be_views(case: Case) -> None:
    layout, wide = case.decodes(), case.queries(2 * len(STARTS))
    found = decode(case.fast(), wide[::2], layout)
    before = decode(case.fast(), wide[::2].contiguous(), layout)
    assert torch.equal(found, before)
    case.pool.tensor = case.pool.tensor.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(decode(case.fast(), wide[::2], layout), before)


def test_what_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def pool(dim=64, size=16, dtype=torch.bfloat16):
        return Pool(torch.zeros(2, 2, 2, 2, size, dim, dtype=dtype), size)

    assert usable(pool()) and usable(pool(dim=256, size=64))
    assert not usable(pool(dim=96)) and not usable(pool(size=8))
    assert not usable(pool(dtype=torch.float32))
    monkeypatch.setattr(attention_bf16, "supported", lambda: False)
    assert not usable(pool())


def test_the_backend_calls_them_where_it_can(case: Case) -> None:
    layout, queries = case.decodes(), case.queries(len(STARTS))
    backend = NumbaAttention(case.pool, case.spec)
    expected = decode(case.fast(), queries, layout)
    assert torch.equal(backend.attend(1, queries, layout), expected)


@pytest.mark.parametrize("rows", [63, 64])
@pytest.mark.parametrize("has_unit", [True, False])
def test_torch_computes_long_chunks_on_amx(
    case: Case, rows: int, has_unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those with a soft cap, nor any of the deterministic mode."""
    monkeypatch.setattr(attention_bf16, "has_matrix_unit", lambda: has_unit)
    queries, chunk = case.queries(rows), case.chunk(16, rows)
    ordinary = NumbaAttention(case.pool, case.spec).chunk(1, queries, chunk)
    invariant = InvariantBfloatAttention(case.pool, case.spec).chunk(1, queries, chunk)
    kernel, torchs = (
        each.chunk(1, queries, chunk)
        for each in (case.fast(), TorchAttention(case.pool, case.spec))
    )
    by_torch = has_unit and rows == 64 and not case.spec.soft_cap
    assert torch.equal(ordinary, torchs if by_torch else kernel)
    assert torch.equal(invariant, kernel)


@pytest.mark.parametrize("turned", [64, 32])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_rotate_and_write(case: Case, rows: int, turned: int) -> None:
    batch = StepBatch(tuple(Slice([1], n % 9, [case.order[n % BLOCKS]]) for n in range(rows)))
    layout = lay_out(batch, Bounds(BLOCKS, case.size, 9, 480))
    kv_heads = case.pool.tensor.shape[1]
    qkv = torch.randn(rows, case.heads + 2 * kv_heads, case.dim).to(torch.bfloat16)
    queries, keys, values = qkv.split([case.heads, kv_heads, kv_heads], dim=1)
    turns = torch.randn(rows, 1, turned // 2)
    cos, sin = turns.cos(), turns.sin()
    angles = torch.cat((cos, cos), -1).bfloat16(), torch.cat((-sin, sin), -1).bfloat16()
    if rows <= BLOCKS:  # each row has a block of its own
        before = case.pool.tensor.clone()
        found = case.fast().rotate_and_write(1, queries, keys, values, angles, layout)
        wide = [each.float() for each in angles]
        close(found, rotate(queries.float(), *wide))
        for row, (block, slot) in enumerate(
            zip(layout.write_blocks.tolist(), layout.write_slots.tolist(), strict=True)
        ):
            tile = case.pool.tensor[block, :, 1, :, slot]  # [kv_head, k|v, dim]
            close(tile[:, 0], rotate(keys[row : row + 1].float(), wide[0][row], wide[1][row])[0])
            assert torch.equal(tile[:, 1], values[row])
            before[block, :, 1, :, slot] = tile
        assert torch.equal(case.pool.tensor, before)  # and nothing else is touched
    else:
        backend = NumbaAttention(case.pool, case.spec)
        out = backend.rotate_and_write(1, queries, keys, values, angles, layout)
        close(out, rotate(queries.float(), *(each.float() for each in angles)))


def test_warming_up_compiles_the_rotation_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh = rotation_bf16.compiled(rotation_bf16.rotate_walk, parallel=True)
    monkeypatch.setattr(rotation_bf16, "_rotate", fresh)
    case = Case("plain")
    before, fast = case.pool.tensor.clone(), case.fast()
    fast.warm_up()
    known = list(fresh.signatures)
    assert len(known) == 1 and torch.equal(case.pool.tensor, before)
    layout, keys = case.decodes([3, 20]), torch.randn(2, 2, case.dim).to(torch.bfloat16)
    turn = torch.ones(2, 1, 32).to(torch.bfloat16)
    fast.rotate_and_write(0, case.queries(2), keys, keys, (turn, turn), layout)
    assert list(fresh.signatures) == known
