"""Latent attention on a GPU: which rows are absorbed, which chunks expanded. The results are held
by `latent_parity` (see test_triton_mla)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from baton.engine.model.mla import expansion_pays
from baton.engine.model.step_layout import Bounds, StepLayout, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.moe_spec import LatentSpec
from baton.engine.triton.decode_buffers import DecodeLimits
from baton.engine.triton.mla_backend import TritonLatentAttention
from baton.runtime.errors import ConfigError
from tests.support.triton_steps import latent_step

SPEC = LatentSpec(24, 8, 16, 8, None, False)
BOUNDS = Bounds(40, 8, 9, 300)


def make(kind=torch.float32, **how):
    stored = torch.zeros(40, 1, 2, 8, SPEC.width).to(kind)
    plain = {"quant": None, "scales": None}
    pool = SimpleNamespace(tensor=stored, dtype=stored.dtype, block_size=8, **plain)
    return TritonLatentAttention(pool, SPEC, 3, 0.25, DecodeLimits(16, 300), **how)


@pytest.fixture
def layout() -> StepLayout:
    """Rows: one that decodes, a chunk that is expanded, one far behind its prefix."""
    batch = StepBatch(
        (
            Slice([1] * 30, 0, [1, 2, 3, 4]),
            Slice([1] * 3, 200, list(range(10, 36))),
            Slice([1], 9, [6, 7]),
        )
    )
    assert expansion_pays(SPEC, 30, 30) and not expansion_pays(SPEC, 3, 203)
    return lay_out(batch, BOUNDS)


def test_short_chunks_are_absorbed_with_the_rows_that_decode(layout: StepLayout) -> None:
    step = latent_step(make(), layout)
    assert [chunk.first for chunk, _ in step.expanded] == [1]
    assert step.expanded[0][1].tolist() == [1, 2, 3, 4]
    absorbed = step.absorbed
    assert absorbed.rows.tolist() == [0, 31, 32, 33]
    assert absorbed.lengths.tolist() == [10, 201, 202, 203]
    assert absorbed.tables[absorbed.sequences[0]].tolist()[:2] == [6, 7]
    for sequence in absorbed.sequences[1:]:
        assert absorbed.tables[sequence].tolist() == list(range(10, 36))
    assert absorbed.sequences.dtype == absorbed.lengths.dtype == torch.int32


def test_deterministic_expands_nothing(layout: StepLayout) -> None:
    step = latent_step(make(deterministic=True), layout)
    assert step.expanded == ()
    assert step.absorbed.rows.tolist() == list(range(34))
    assert step.absorbed.lengths.tolist() == [10, *range(1, 31), 201, 202, 203]


def test_rows_that_decode_alone_are_not_gathered() -> None:
    """So that a captured graph reads what the next step's layout is written into."""
    batch = StepBatch((Slice([1], 3, [7]), Slice([1], 9, [2, 4])))
    layout = lay_out(batch, BOUNDS)
    absorbed = latent_step(make(), layout).absorbed
    assert absorbed.rows is None
    assert absorbed.lengths is layout.decode_lengths
    assert absorbed.tables is layout.decode_tables
    assert absorbed.sequences.tolist() == [0, 1]


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_a_pool_of_other_numbers_is_refused(kind: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"{kind}.*bfloat16, float16, float32.*worker.dtype"):
        make(kind)


def test_arrays_are_made_once_a_step(layout: StepLayout) -> None:
    attention = make()
    step = latent_step(attention, layout)
    assert latent_step(attention, layout) is step
    other = lay_out(StepBatch((Slice([1], 0, [1]),)), BOUNDS)
    assert latent_step(attention, other) is not step
