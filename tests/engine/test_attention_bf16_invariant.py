"""A decode row must have the bits of the same row in a chunk; both are held against float64."""

from __future__ import annotations

import random

import pytest
import torch

import baton.engine.cpu.attention_bf16_invariant as attention_bf16_invariant
from baton.engine.cpu.attention_bf16_invariant import InvariantBfloatAttention
from baton.engine.cpu.dot_bf16 import supported
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import TorchAttention
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
BLOCKS, LAYERS, LENGTH = 40, 2, 200
# heads, KV heads, dim, block size, window, soft cap
SHAPES = {
    "plain": (4, 2, 64, 16, 0, 0.0),
    "wide heads": (3, 3, 128, 16, 0, 0.0),
    "odd group": (7, 1, 64, 32, 0, 0.0),
    "more queries than fit at once": (10, 2, 64, 16, 0, 0.0),
    "window": (4, 2, 64, 16, 21, 0.0),
    "a window of whole tiles": (4, 2, 128, 16, 64, 0.0),
    "window and cap": (2, 2, 64, 32, 40, 5.0),
}


class Pool(KvPool):
    """What the kernels use of one."""

    def __init__(self, tensor, block_size):
        self.tensor, self.block_size = tensor, block_size
        self.quant = self.scales = None


class Case:
    def __init__(self, name):
        torch.manual_seed(len(name))
        self.heads, self.kv_heads, self.dim, self.size, window, cap = SHAPES[name]
        shape = (BLOCKS, self.kv_heads, LAYERS, 2, self.size, self.dim)
        self.pool = Pool(torch.randn(shape).bfloat16(), self.size)
        self.spec = AttentionSpec(self.dim**-0.5, (0, window), cap)
        self.blocks = torch.randperm(BLOCKS).tolist()[: -(-LENGTH // self.size)]
        self.queries = torch.randn(LENGTH, self.heads, self.dim).bfloat16()

    def layout(self, *parts):
        """`parts` are (start, end) of the one sequence."""
        slices = (Slice([1] * (end - start), start, self.blocks) for start, end in parts)
        return lay_out(StepBatch(tuple(slices)), Bounds(BLOCKS, self.size, 9, 480))

    def attend(self, *parts, layer=1):
        layout = self.layout(*parts)
        queries = torch.cat([self.queries[start:end] for start, end in parts])
        return InvariantBfloatAttention(self.pool, self.spec).attend(layer, queries, layout)


@pytest.fixture(params=list(SHAPES))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_every_row_decodes_to_the_bits_of_the_chunk(case: Case) -> None:
    whole = case.attend((0, LENGTH))
    singles = [(at, at + 1) for at in range(LENGTH)]
    assert torch.equal(case.attend(*singles), whole)
    for at in (0, 1, 15, 16, 63, 64, 130, 199):  # and alone
        assert torch.equal(case.attend((at, at + 1))[0], whole[at])


@pytest.mark.parametrize("seed", range(3))
def test_nor_does_it_matter_where_a_chunk_is_cut(case: Case, seed: int) -> None:
    whole, chooser, start = case.attend((0, LENGTH)), random.Random(seed), 0
    while start < LENGTH:
        end = min(LENGTH, start + chooser.choice([1, 2, 3, 7, 40, 64, 90]))
        beside = (chooser.randrange(100), chooser.randrange(100, LENGTH))
        rows = case.attend((start, end), beside) if end - start == 1 else case.attend((start, end))
        assert torch.equal(rows[: end - start], whole[start:end]), (start, end)
        start = end


def test_is_attention_up_to_rounding(case: Case) -> None:
    wide = Pool(case.pool.tensor.double(), case.size)
    singles = [(at, at + 1) for at in range(LENGTH)]
    for layer in range(LAYERS):
        reference = TorchAttention(wide, case.spec)
        expected = reference.attend(layer, case.queries.double(), case.layout((0, LENGTH)))
        found = case.attend(*singles, layer=layer)
        # A weight and the result are each rounded to 8 bits; values are below 5.
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=5 * 2**-8)


def test_what_was_never_written_does_not_matter(case: Case) -> None:
    """Even as NaN: the tokens after the last one, in its block and in others."""
    for length in (1, 20, 21, 64):
        case.pool.tensor.normal_()
        before = case.attend((length - 1, length))
        used = torch.zeros(BLOCKS, case.size, dtype=torch.bool)
        for at in range(length):
            used[case.blocks[at // case.size], at % case.size] = True
        case.pool.tensor.masked_fill_(~used[:, None, None, None, :, None], float("nan"))
        assert torch.equal(case.attend((length - 1, length)), before)


@pytest.mark.parametrize("side", [0, 1])
def test_a_number_that_is_not_finite_is_seen(case: Case, side: int) -> None:
    """It must reach the check for broken slices, not vanish: in a key, in a value."""
    case.pool.tensor[case.blocks[30 // case.size], :, 1, side, 30 % case.size] = torch.nan
    assert not case.attend((30, 31)).isfinite().any()
    assert case.attend((29, 30)).isfinite().all()


def test_threads_change_no_bit(case: Case) -> None:
    singles = [(at, at + 1) for at in range(0, LENGTH, 7)]
    one = case.attend(*singles)
    torch.set_num_threads(2)
    try:
        assert torch.equal(case.attend(*singles), one)
    finally:
        torch.set_num_threads(1)


def test_large_scores_do_not_overflow(case: Case) -> None:
    case.queries *= 1e4
    assert case.attend((150, 151), (7, 8)).isfinite().all()


def test_it_is_compiled_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = attention_bf16_invariant.decode_walk
    fresh = attention_bf16_invariant.compiled(walk, parallel=True, strict=True)
    monkeypatch.setattr(attention_bf16_invariant, "_decode", fresh)
    case = Case("plain")
    before = case.pool.tensor.clone()
    attention = InvariantBfloatAttention(case.pool, case.spec)
    known = list(fresh.signatures)
    assert len(known) == 1 and torch.equal(case.pool.tensor, before)
    attention.decode(1, case.queries[:2], case.layout((3, 4), (20, 21)))
    assert list(fresh.signatures) == known
