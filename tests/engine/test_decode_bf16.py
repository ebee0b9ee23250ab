"""How a decode step's jobs are cut into parts, and that the parts do not change its results.
Parity of the kernels: test_attention_bf16.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.cpu.attention_bf16 import BfloatAttention
from baton.engine.cpu.decode_bf16 import _find, _first, attend_all, new_scratch, tile_position
from baton.engine.cpu.dot_bf16 import supported
from baton.engine.spec.model_spec import AttentionSpec

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
KV_HEADS, HEADS, DIM, SIZE = 2, 6, 64, 16


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [1000, 1, 1, 1], [3, 3, 900, 40, 77]])
@pytest.mark.parametrize("parts", [1, 2, 3, 16])
def test_every_job_is_in_one_part_and_parts_cost_alike(
    lengths: list[int], parts: int, window: int
) -> None:
    kv_heads = 4
    given = np.array(lengths, dtype=np.int32)
    firsts = [_first(given, window, kv_heads, part, parts) for part in range(parts + 1)]
    assert firsts[0] == 0 and firsts[-1] == len(lengths) * kv_heads
    assert firsts == sorted(firsts)
    cost = [(min(n, window) if window else n) + 32 for n in lengths for _ in range(kv_heads)]
    fair = sum(cost) / parts
    for first, end in zip(firsts, firsts[1:], strict=False):
        assert sum(cost[first:end]) <= fair + max(cost)


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("window", [0, 20])
def test_positions_of_tiles_are_those_that_a_job_reads(size: int, window: int) -> None:
    """And beyond a job's last tile, and beyond the last job, the first position of all."""
    tables = np.array([[5, 3, 8, 6], [7, 1, 2, 4]], dtype=np.int32)
    lengths, strides = np.array([50, 33], dtype=np.int32), (10**6, 10**5, 0, 10)
    given = (KV_HEADS, size, tables, lengths, window)
    found = np.zeros(9, dtype=np.int64)
    for job in range(len(lengths) * KV_HEADS):
        count = _find(job, 0, strides, KV_HEADS, size, tables, lengths, window, found)
        tiles = [tile_position(job, number, *given) for number in range(count)]
        assert count > 0 and [position[1] for position in tiles] == [job % KV_HEADS] * count
        addresses = [sum(x * y for x, y in zip(p, (10**6, 10**5, 10), strict=True)) for p in tiles]
        assert addresses == found[:count].tolist()
        assert tile_position(job, count, *given) == (0, 0, 0)
    assert tile_position(len(lengths) * KV_HEADS, 0, *given) == (0, 0, 0)


@pytest.mark.parametrize("parts", [2, 3, 20])
def test_parts_do_not_change_a_bit(parts: int) -> None:
    torch.manual_seed(parts)
    pool = torch.randn(12, KV_HEADS, 1, 2, SIZE, DIM).bfloat16()
    tables = torch.stack([torch.randperm(12)[:4] for _ in range(5)]).to(torch.int32)
    lengths = torch.tensor([1, 16, 17, 40, 64], dtype=torch.int32)
    queries = torch.randn(5, HEADS, DIM).bfloat16()
    found = []
    for count in (1, parts):
        shared = new_scratch(count, HEADS // KV_HEADS, DIM, 64)
        out = torch.full_like(queries, torch.nan)
        block, head, _, pair, token = (2 * stride for stride in pool.stride()[:5])
        attend_all(
            pool.data_ptr(),
            (block, head, pair, token),
            KV_HEADS,
            SIZE,
            DIM,
            queries.data_ptr(),
            HEADS,
            tables.numpy(),
            lengths.numpy(),
            0,
            np.float32(0.2),
            np.float32(0.0),
            shared.tiles,
            shared.weights,
            shared.mixed,
            out.data_ptr(),
        )
        found.append(out)
    assert found[0].isfinite().all() and torch.equal(found[0], found[1])


def test_room_is_for_the_longest_sequence() -> None:
    shared = new_scratch(3, 4, 64, 33)
    assert shared.tiles.shape == (3, 2, 3)
    assert shared.weights.shape == (3, 4, 48)
    assert shared.mixed.shape == (3, 4, 64)


def test_memory_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken before threads start, where a failure would go unseen."""

    class Pool:
        tensor, block_size = torch.zeros(2, 1, 1, 2, SIZE, DIM).bfloat16(), SIZE

    def fail(*arguments):
        raise RuntimeError("can't allocate memory")

    attention = BfloatAttention(Pool(), AttentionSpec(0.2, (0,), 0.0))
    monkeypatch.setattr("baton.engine.cpu.attention_bf16.new_scratch", fail)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="can't allocate"):
        attention.decode(0, torch.zeros(1, 1, DIM).bfloat16(), one[None] * 0, one)
