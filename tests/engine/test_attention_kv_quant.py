"""Compiled attention over eight bits against `TorchAttention` in float32 over the same pool."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace

import pytest
import torch

import baton.engine.cpu.attention_kv_quant as attention_codes
from baton.engine.cpu import attention_bf16
from baton.engine.cpu.attention_invariant import InvariantAttention
from baton.engine.cpu.attention_kv_quant import KvQuantAttention
from baton.engine.cpu.attention_kv_quant_bf16 import BfloatKvQuantAttention, usable
from baton.engine.cpu.dot_bf16 import supported
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.model.attention import TorchAttention
from baton.engine.model.rope import rotate
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec

BLOCKS, LAYERS, SIZE = 24, 2, 16
STARTS = [0, 1, 15, 16, 17, 63, 100]
# heads, KV heads, dim, window, soft cap
SHAPES = {
    "plain": (4, 2, 64, 0, 0.0),
    "odd-group": (3, 1, 128, 0, 0.0),
    "window": (4, 2, 64, 21, 0.0),
    "window-and-cap": (2, 2, 64, 40, 5.0),
}
EXACT = {torch.float32: 5e-6, torch.bfloat16: 3e-2}


class Case:
    """A pool with random rows in its first layers' blocks, and batches over it."""

    def __init__(self, shape, name, dtype, dim=0):
        torch.manual_seed(5)
        self.heads, self.kv_heads, self.dim, window, cap = SHAPES[shape]
        self.dim = dim or self.dim
        self.codes = KV_QUANTS[name]
        self.model = SimpleNamespace(
            kv_heads=self.kv_heads, layers=LAYERS, head_dim=self.dim, latent=None, features=0
        )
        self.pool = self.made(dtype)
        positions = torch.arange(BLOCKS * SIZE)
        kv = torch.randn(len(positions), self.kv_heads, 2, self.dim)
        self.pool.put(1, positions // SIZE, positions % SIZE, kv)
        self.spec = AttentionSpec(0.3, (0, window), cap)
        self.order = torch.randperm(BLOCKS).tolist()

    def made(self, dtype):
        return KvPool(self.model, BLOCKS, SIZE, dtype, quant=self.codes)

    def compiled(self):
        return KvQuantAttention(self.pool, self.spec)

    def reference(self):
        wide = self.made(torch.float32)
        wide.memory.copy_(self.pool.memory)
        return TorchAttention(wide, self.spec)

    def copied_beside(self, heads, dim):
        """Return this case with a pool whose blocks also hold a draft's KV, which is no number."""
        found, draft = copy(self), copy(self.model)
        draft.kv_heads, draft.head_dim = heads, dim
        found.pool = KvPool(
            self.model, BLOCKS, SIZE, self.pool.dtype, quant=self.codes, draft=draft
        )
        found.pool.draft.tensor.fill_(torch.nan)
        found.pool.memory.copy_(self.pool.memory)
        return found

    def copied_between(self):
        """Return this case with a rank's view of a pool whose other heads are no numbers."""
        found, wide = copy(self), copy(self.model)
        wide.kv_heads = self.kv_heads + 2
        whole = KvPool(wide, BLOCKS, SIZE, self.pool.dtype, quant=self.codes)
        whole.scales.fill_(torch.nan)
        found.pool = whole.of_heads(range(1, 1 + self.kv_heads))
        found.pool.tensor.view(torch.uint8).copy_(self.pool.tensor.view(torch.uint8))
        found.pool.scales.copy_(self.pool.scales)
        return found

    def queries(self, rows):
        return torch.randn(rows, self.heads, self.dim).to(self.pool.dtype)

    def batch(self, *pieces):
        """`pieces` are (start, tokens); each has a table of its own, which blocks share."""
        slices = []
        for index, (start, count) in enumerate(pieces):
            needed = -(-(start + count) // SIZE)
            table = [self.order[(3 * index + i) % BLOCKS] for i in range(needed)]
            slices.append(Slice([1] * count, start, table))
        return lay_out(StepBatch(tuple(slices)), Bounds(BLOCKS, SIZE, 9, 384))


def stored(name, dtype, *marks):
    return pytest.param(
        (name, dtype), id=f"{name}-{str(dtype).removeprefix('torch.')}", marks=marks
    )


@pytest.fixture(
    params=[  # each pair compiles its kernels for ten seconds; `make nightly` has the others
        stored("int8", torch.bfloat16),
        stored("fp8_e4m3", torch.float32, pytest.mark.nightly),
        stored("int8", torch.float32, pytest.mark.nightly),
        stored("fp8_e4m3", torch.bfloat16, pytest.mark.nightly),
    ]
)
def formats(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    return request.param


one_name = pytest.mark.parametrize(
    "name", ["int8", pytest.param("fp8_e4m3", marks=pytest.mark.nightly)]
)


@pytest.fixture
def name(formats: tuple[str, torch.dtype]) -> str:
    return formats[0]


@pytest.fixture
def dtype(formats: tuple[str, torch.dtype]) -> torch.dtype:
    return formats[1]


@pytest.fixture(params=list(SHAPES))
def case(request: pytest.FixtureRequest, name: str, dtype: torch.dtype) -> Case:
    return Case(request.param, name, dtype)


MIXED = [(start, 1) for start in STARTS] + [(0, 2), (7, 30), (64, 64), (90, 13), (0, 65)]


def test_decodes_and_chunks_of_one_step(case: Case) -> None:
    layout = case.batch(*MIXED)
    queries = case.queries(len(layout.tokens))
    found = case.compiled().attend(1, queries, layout)
    assert found.dtype == queries.dtype
    expected = case.reference().attend(1, queries.float(), layout)
    bound = EXACT[case.pool.dtype]
    torch.testing.assert_close(found.float(), expected, rtol=bound, atol=bound)
    assert (found.float() - expected).norm() < bound / 6 * expected.norm()


def test_torch_alone_reads_the_same(case: Case) -> None:
    """What serves where numba is missing."""
    layout = case.batch(*MIXED)
    queries = case.queries(len(layout.tokens))
    found = TorchAttention(case.pool, case.spec).attend(1, queries, layout)
    expected = case.reference().attend(1, queries.float(), layout)
    bound = 3e-2 if case.pool.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.float(), expected, rtol=bound, atol=bound)


def test_a_decode_row_is_the_same_bits_in_any_batch(case: Case) -> None:
    layout, compiled = case.batch(*MIXED), case.compiled()
    queries = case.queries(len(layout.tokens))
    together = compiled.attend(1, queries, layout)
    for row, start in enumerate(STARTS):
        table = layout.decode_tables[row, : start // SIZE + 1].tolist()
        alone = lay_out(StepBatch((Slice([1], start, table),)), Bounds(BLOCKS, SIZE, 9, 384))
        assert torch.equal(compiled.attend(1, queries[row : row + 1], alone)[0], together[row])


def test_what_was_never_written_does_not_matter(case: Case) -> None:
    """Even as no number: the tokens after the last one, in its block and in others."""
    layout = case.batch((20, 1), (0, 21))
    queries, compiled = case.queries(22), case.compiled()
    before = compiled.attend(1, queries, layout)
    used = torch.zeros(BLOCKS, SIZE, dtype=torch.bool)
    for table in (layout.decode_tables[0].tolist(), layout.chunks[0].blocks.tolist()):
        for position in range(21):
            used[table[position // SIZE], position % SIZE] = True
    case.pool.scales.masked_fill_(~used[:, None, None, None, :], torch.nan)
    assert torch.equal(compiled.attend(1, queries, layout), before)


@pytest.mark.parametrize("side", [0, 1])
def test_a_row_that_is_no_number_is_seen(case: Case, side: int) -> None:
    layout = case.batch((30, 1), (5, 1), (0, 31))
    for table in (layout.decode_tables[0], layout.chunks[0].blocks):
        case.pool.scales[table[30 // SIZE], :, 1, side, 30 % SIZE] = torch.nan
    found = case.compiled().attend(1, case.queries(33), layout)
    assert found[[0, 32]].isnan().all() and found[1].isfinite().all()


def test_rows_are_written_as_torch_writes_them(case: Case) -> None:
    rows = 2 * BLOCKS
    layout = case.batch(*((n % 9, 1) for n in range(rows // 3)))
    rows = len(layout.tokens)
    keys, values = torch.randn(2, rows, case.kv_heads, case.dim).to(case.pool.dtype)
    plain = case.made(case.pool.dtype)
    plain.memory.copy_(case.pool.memory)
    TorchAttention(plain, case.spec).write(0, keys, values, layout)
    case.compiled().write(0, keys, values, layout)
    assert torch.equal(case.pool.memory, plain.memory)


@pytest.mark.parametrize("turned", [64, 32, 20])
def test_rotate_and_write(name: str, dtype: torch.dtype, turned: int) -> None:
    case = Case("plain", name, dtype)
    layout = case.batch(*((n, 1) for n in range(8)))
    qkv = torch.randn(8, case.heads + 2 * case.kv_heads, case.dim).to(dtype)
    queries, keys, values = qkv.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
    turns = torch.randn(8, 1, turned // 2)
    cos, sin = turns.cos(), turns.sin()
    angles = torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
    found = case.compiled().rotate_and_write(1, queries, keys, values, angles, layout)
    wide = [each.float() for each in angles]
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        found.float(), rotate(queries.float(), *wide), rtol=bound, atol=bound
    )
    rows = case.pool.take(1, layout.write_blocks)[torch.arange(8), :, :, layout.write_slots]
    turned_keys = rotate(keys.float(), *wide)
    lost = 0.03 if name == "int8" else 0.2
    torch.testing.assert_close(rows[:, :, 0].float(), turned_keys, rtol=0.07, atol=lost)
    torch.testing.assert_close(rows[:, :, 1].float(), values.float(), rtol=0.07, atol=lost)


@one_name
@pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
def test_which_kernels_are_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Case("plain", name, torch.bfloat16)
    assert usable(fast.pool) and isinstance(fast.compiled().fast, BfloatKvQuantAttention)
    for case in (Case("plain", name, torch.float32), Case("plain", name, torch.bfloat16, dim=32)):
        assert not usable(case.pool)
        assert isinstance(case.compiled().strict, InvariantAttention)
    monkeypatch.setattr(attention_codes, "usable", lambda pool: False)
    layout, queries = fast.batch(*MIXED), fast.queries(200)
    queries = queries[: len(layout.tokens)]
    strict = fast.compiled()  # as on a processor without the instruction
    assert strict.fast is None
    torch.testing.assert_close(
        strict.attend(1, queries, layout).float(),
        fast.reference().attend(1, queries.float(), layout),
        rtol=1.6e-2,
        atol=1.6e-2,
    )


@one_name
@pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
def test_large_scores_and_views(name: str) -> None:
    case = Case("plain", name, torch.bfloat16)
    layout = case.batch(*((start, 1) for start in STARTS))
    wide = case.queries(2 * len(STARTS))
    found = case.compiled().attend(1, wide[::2], layout)
    assert torch.equal(found, case.compiled().attend(1, wide[::2].contiguous(), layout))
    assert case.compiled().attend(1, wide[::2] * 1e4, layout).isfinite().all()


VIEWS = {
    "beside-three-heads": lambda case: case.copied_beside(3, 64),
    "beside-two-heads": lambda case: case.copied_beside(2, 32),
    "of-a-rank": lambda case: case.copied_between(),
}


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("case", ["plain", "odd-group", "window"], indirect=True)
def test_part_of_a_block_computes_as_a_whole_one(case: Case, view: str) -> None:
    """Where a block also holds a draft's KV or other ranks' heads, which are no numbers."""
    layout = case.batch(*MIXED)
    queries = case.queries(len(layout.tokens))
    part = VIEWS[view](case)
    compiled, outside = part.compiled(), part.pool.bytes_view().copy()
    found = compiled.attend(1, queries, layout)
    assert torch.equal(found, case.compiled().attend(1, queries, layout))
    expected = case.reference().attend(1, queries.float(), layout)
    bound = EXACT[case.pool.dtype]
    torch.testing.assert_close(found.float(), expected, rtol=bound, atol=bound)
    assert (part.pool.bytes_view() == outside).all()
    keys, values = torch.randn(2, len(layout.tokens), case.kv_heads, case.dim).to(queries.dtype)
    TorchAttention(case.pool, case.spec).write(0, keys, values, layout)
    compiled.write(0, keys, values, layout)
    assert torch.equal(part.pool.memory, case.pool.memory)


@one_name
@pytest.mark.parametrize("rows", [255, 256])
def test_torch_computes_long_chunks_on_amx(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_bf16, "has_matrix_unit", lambda: True)
    case = Case("plain", name, torch.bfloat16)
    queries, (chunk,) = case.queries(rows), case.batch((16, rows)).chunks
    compiled = case.compiled()
    kernel = compiled.fast.chunk(1, queries, chunk)
    torchs = TorchAttention(case.pool, case.spec).chunk(1, queries, chunk)
    assert not torch.equal(kernel, torchs)
    assert torch.equal(compiled.chunk(1, queries, chunk), torchs if rows == 256 else kernel)
