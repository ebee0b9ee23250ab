"""The GPU's attention: whole steps under triton's interpreter; buffers and refusals anywhere."""

from types import SimpleNamespace

import pytest
import torch

from baton.engine import attention_triton
from baton.engine.attention_triton import DecodeLimits, TritonAttention
from baton.engine.batch import Slice, StepBatch
from baton.engine.spec import AttentionSpec
from baton.engine.step_layout import Bounds, lay_out
from baton.engine.triton_tile import Tiles
from baton.runtime.errors import ConfigError, EngineError

SPEC = AttentionSpec(0.25, (0, 8))


def pool(dtype=torch.bfloat16, kv_heads=2, dim=16):
    return SimpleNamespace(tensor=torch.zeros(12, kv_heads, 2, 2, 8, dim).to(dtype))


@pytest.fixture
def anywhere(monkeypatch):
    """As if triton had a device with 132 multiprocessors."""
    monkeypatch.setattr(attention_triton, "device_tiles", lambda *_: Tiles(128, 64, 8, 3))
    monkeypatch.setattr(attention_triton, "_processors", lambda device: 132)


def make(limits, **how):
    return TritonAttention(pool(), SPEC, 6, limits, **how)


@pytest.mark.parametrize("how", ["splits by count", "fixed splits", "deterministic"])
def test_steps_are_those_of_the_reference(attention_checks, how):
    found = attention_checks[f"step, {how}"]
    assert found["good"], found["said"]


@pytest.mark.parametrize("tokens", [0, 256])
def test_buffers_hold_the_splits_of_every_batch(anywhere, tokens):
    limits = DecodeLimits(40, 3000, split_tokens=tokens)
    attention = make(limits)
    seen = set()
    for rows in range(1, limits.rows + 1):
        partials = attention._partials(rows)
        splits = attention.splits(rows)
        assert partials.mixed.shape[:2] == (rows, 6)
        assert partials.mixed.shape[2] >= splits.capacity(limits.longest, 64)
        assert partials.mixed.is_contiguous()
        assert partials.weights.shape == partials.mixed.shape[:3]
        seen.add(splits)
    assert len(seen) > 1
    assert {splits.tokens for splits in seen} == {tokens}


def test_buffers_are_made_once(anywhere):
    attention = make(DecodeLimits(8, 1000))
    places = {attention._partials(rows).mixed.data_ptr() for rows in (1, 8, 3)}
    assert len(places) == 1


def test_deterministic_needs_no_buffers(anywhere):
    assert make(DecodeLimits(64, 100_000), deterministic=True)._mixed.numel() == 0


def test_more_rows_than_agreed_are_refused(anywhere):
    with pytest.raises(EngineError, match="9 rows"):
        make(DecodeLimits(8, 1000))._partials(9)


def test_a_pool_of_other_numbers_is_refused():
    with pytest.raises(ConfigError, match=r"torch\.int8.*bfloat16, float16, float32"):
        TritonAttention(pool(torch.int8), SPEC, 4, DecodeLimits(4, 100))


def test_arrays_of_a_step_are_made_once(anywhere):
    """Every layer of a step asks with the same layout."""
    attention = make(DecodeLimits(8, 1000))
    batch = StepBatch((Slice([1], 3, [7]), Slice([1] * 30, 5, [1, 2, 3, 4, 5]), Slice([1], 0, [9])))
    layout = lay_out(batch, Bounds(12, 8, 9, 100))
    step = attention._prepared(layout)
    assert attention._prepared(layout) is step
    assert step.lengths is layout.decode_lengths  # nothing is copied that is there already
    assert step.chunks.tables.tolist() == [[1, 2, 3, 4, 5]]
    assert step.chunks.tables.dtype == torch.int32
    assert step.chunks.tiles.tolist() == [[0, 2, 30, 5]]
    other = lay_out(StepBatch(batch.slices[:1]), Bounds(12, 8, 9, 100))
    assert attention._prepared(other).chunks.tiles.shape == (0, 4)


def test_tables_of_chunks_are_padded():
    batch = StepBatch((Slice([1] * 9, 0, [4, 2]), Slice([1] * 20, 2, [7, 1, 3])))
    layout = lay_out(batch, Bounds(12, 8, 9, 100))
    tables = attention_triton._chunk_tables(layout.chunks)
    assert tables.tolist() == [[4, 2, 0], [7, 1, 3]]
