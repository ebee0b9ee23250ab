"""The rotation into an array that is no pool: rows one after the other, as eight bits take them."""

from __future__ import annotations

import pytest
import torch

from baton.engine.cpu.dot_bf16 import supported
from baton.engine.cpu.rotation_bf16 import rotate_into
from baton.engine.model.rope import rotate

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_rows_go_where_strides_and_positions_say(rows: int) -> None:
    torch.manual_seed(rows)
    qkv = torch.randn(rows, 8, 64).to(torch.bfloat16)
    queries, keys, values = qkv.split([4, 2, 2], dim=1)
    turns = torch.randn(rows, 1, 32)
    cos, sin = turns.cos(), turns.sin()
    angles = torch.cat((cos, cos), -1).bfloat16(), torch.cat((-sin, sin), -1).bfloat16()
    out = torch.full((rows + 1, 2, 2, 64), torch.nan, dtype=torch.bfloat16)
    strides = tuple(2 * out.stride(axis) for axis in (0, 1)) + (0, 2 * out.stride(2), 0)
    order = torch.randperm(rows)
    positions = order, torch.zeros(rows, dtype=torch.int64)
    found = rotate_into(out.data_ptr(), strides, (queries, keys, values), angles, positions)
    wide = [each.float() for each in angles]
    torch.testing.assert_close(found.float(), rotate(queries.float(), *wide), rtol=0.01, atol=0.02)
    turned = rotate(keys.float(), *wide)
    torch.testing.assert_close(out[order, :, 0].float(), turned, rtol=0.01, atol=0.02)
    assert torch.equal(out[order, :, 1], values)
    assert out[rows].isnan().all()


def test_numbers_of_another_kind_are_not_taken() -> None:
    keys = torch.zeros(1, 2, 64)
    with pytest.raises(AssertionError):
        rotate_into(0, (0,) * 5, (keys, keys, keys), (keys, keys), (torch.zeros(1), keys))
