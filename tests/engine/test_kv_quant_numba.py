"""The compiled codes are those of plain torch, bit for bit, and touch nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.engine.cpu.kv_quant_numba import Slabs, decode_row
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import FP8_E4M3, INT8, MIN_MAGNITUDE, KvQuant

HEADS, LAYERS, SIZE, BLOCKS = 3, 2, 8, 20


@pytest.fixture(params=[INT8, FP8_E4M3], ids=["int8", "fp8"])
def codes(request: pytest.FixtureRequest) -> KvQuant:
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def make_pool(codes, dtype, dim):
    shape = SimpleNamespace(kv_heads=HEADS, layers=LAYERS, head_dim=dim, latent=None, features=0)
    return KvPool(shape, BLOCKS, SIZE, dtype, quant=codes)


def both(codes, dtype, kv):
    """The memory of two pools that the rows of `kv` were written to, by torch and compiled."""
    pools = [make_pool(codes, dtype, kv.shape[-1]) for _ in range(2)]
    positions = torch.randperm(BLOCKS * SIZE)[: len(kv)]
    blocks, slots = positions // SIZE, positions % SIZE
    pools[0].put(1, blocks, slots, kv.to(dtype))
    Slabs(pools[1]).write(1, blocks, slots, kv.to(dtype))
    return pools[0].memory, pools[1].memory


@pytest.mark.parametrize("dim", [4, 20, 64])
@pytest.mark.parametrize("rows", [1, 2, 100])
def test_rows_of_all_magnitudes(codes: KvQuant, dtype: torch.dtype, rows: int, dim: int) -> None:
    torch.manual_seed(rows)
    kv = torch.randn(rows, HEADS, 2, dim) * torch.logspace(30, -32, rows)[:, None, None, None]
    by_torch, compiled = both(codes, dtype, kv)
    assert torch.equal(by_torch, compiled) and compiled.any()


def test_ties_and_small_parts_of_a_row(codes: KvQuant, dtype: torch.dtype) -> None:
    """Halves, quarters and so on of the greatest, where the nearest of two codes is a tie."""
    kv = torch.zeros(60, HEADS, 2, 64)
    kv[..., 0] = torch.linspace(1, 500, 60)[:, None, None]
    kv[..., 1:] = kv[..., :1] * torch.logspace(0, -20, 63, base=2.0)
    kv[1::2] *= -1
    assert torch.equal(*both(codes, dtype, kv))
    whole = torch.arange(-448.0, 448.0, 7 / 8).view(-1, 1, 1, 64).expand(-1, HEADS, 2, -1).clone()
    whole[..., 0] = 448.0
    assert torch.equal(*both(codes, dtype, whole))


def test_rows_that_have_no_codes(codes: KvQuant, dtype: torch.dtype) -> None:
    kv = torch.randn(6, HEADS, 2, 16)
    kv[0], kv[1] = 0, MIN_MAGNITUDE / 2
    kv[2, 1, 0, 3], kv[3, 0, 1, 15], kv[4, 2, 1, 0] = torch.nan, torch.inf, -torch.inf
    by_torch, compiled = both(codes, dtype, kv)
    assert torch.equal(by_torch, compiled)
    pool = make_pool(codes, dtype, 16)
    pool.memory.copy_(compiled)
    assert int(pool.scales.isnan().sum()) == 3


def test_every_code_is_read_as_torch_reads_it(codes: KvQuant) -> None:
    all_codes, words = torch.arange(256, dtype=torch.uint8), np.empty(256, dtype=np.uint32)
    for scale in (1.0, 0.37, 2.0**-90, 2.0**100):
        decode_row(all_codes.numpy(), np.float32(scale), codes is FP8_E4M3, words)
        expected = codes.decode(all_codes.view(codes.dtype), torch.tensor(scale))
        there = ~expected.isnan()  # FP8 has two codes that are no number; none is ever written
        found = torch.from_numpy(words.view(np.float32))
        assert torch.equal(found[there], expected[there]) and there.sum() >= 254


def test_a_row_without_codes_is_read_as_no_number(codes: KvQuant) -> None:
    words = np.empty(8, dtype=np.uint32)
    decode_row(np.zeros(8, dtype=np.uint8), np.float32(np.nan), codes is FP8_E4M3, words)
    assert np.isnan(words.view(np.float32)).all()
