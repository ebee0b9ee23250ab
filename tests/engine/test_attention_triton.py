"""The GPU's attention: whole steps under triton's interpreter; buffers and refusals anywhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec
from baton.engine.triton import attention_backend as attention_triton
from baton.engine.triton.attention_backend import TritonAttention
from baton.engine.triton.decode_buffers import DecodeLimits
from baton.engine.triton.tile import Tiles
from baton.runtime.errors import ConfigError
from tests.support.json_values import JsonObject
from tests.support.triton_steps import attention_step, splits_sequences

SPEC = AttentionSpec(0.25, (0, 8))


def pool(dtype=torch.bfloat16, kv_heads=2, dim=16):
    tensor = torch.zeros(12, kv_heads, 2, 2, 8, dim).to(dtype)
    return SimpleNamespace(tensor=tensor, dtype=dtype, scales=None)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if triton had a device."""
    monkeypatch.setattr(attention_triton, "device_tiles", lambda *_: Tiles(128, 64, 8, 3))


def make(limits, **how):
    return TritonAttention(pool(), SPEC, 6, limits, **how)


@pytest.mark.parametrize(
    "how", ["splits by count", "fixed splits", "buffers for fewer rows", "deterministic"]
)
def test_steps_are_those_of_the_reference(step_checks: dict[str, JsonObject], how: str) -> None:
    found = step_checks[f"step, {how}"]
    assert found["good"], found["said"]


def test_deterministic_needs_no_buffers(anywhere: None) -> None:
    assert not splits_sequences(make(DecodeLimits(64, 100_000), deterministic=True))
    assert splits_sequences(make(DecodeLimits(64, 100_000)))


def test_a_pool_of_other_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.int8.*bfloat16, float16, float32"):
        TritonAttention(pool(torch.int8), SPEC, 4, DecodeLimits(4, 100))


def test_arrays_of_a_step_are_made_once(anywhere: None) -> None:
    """Every layer of a step asks with the same layout."""
    attention = make(DecodeLimits(8, 1000))
    batch = StepBatch((Slice([1], 3, [7]), Slice([1] * 30, 5, [1, 2, 3, 4, 5]), Slice([1], 0, [9])))
    layout = lay_out(batch, Bounds(12, 8, 9, 100))
    step = attention_step(attention, layout)
    assert attention_step(attention, layout) is step
    assert step.arrays.lengths is layout.decode_lengths  # nothing is copied that is there already
    assert step.plan.tables.tolist() == [[1, 2, 3, 4, 5]]
    assert step.plan.tables.dtype == torch.int32
    assert step.plan.tiles.tolist() == [[0, 2, 30, 5]]
    other = lay_out(StepBatch(batch.slices[:1]), Bounds(12, 8, 9, 100))
    assert attention_step(attention, other).plan.tiles.shape == (0, 4)
