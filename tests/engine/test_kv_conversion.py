"""KV in the layout and the dtype of another pool: what that pool would have written itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from baton.engine.memory.kv_conversion import conversion_to
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.spec.model_spec import read_spec
from tests.support.small_models import Reference

SIZE, BLOCKS = 8, 5
BOUND = {"int8": 0.5 / 127, "fp8_e4m3": 1 / 16}  # of a row's largest, and of a number


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


def plain_pool(spec, dtype, draft=None):
    pool = KvPool(spec, BLOCKS, SIZE, dtype, draft=draft)
    torch.manual_seed(7)
    pool.bytes_tensor().copy_(torch.randint(0, 256, pool.bytes_tensor().shape, dtype=torch.uint8))
    pool.tensor.normal_(std=3.0)
    pool.tensor[:, :, :, ..., 2, :] = 0  # a row of zeros
    return pool


def plain_name(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", sorted(KV_QUANTS))
def test_codes_and_scales_are_those_of_a_pool_in_eight_bits(
    qwen3: Reference, dtype: torch.dtype, name: str
) -> None:
    spec = read_spec(qwen3.folder)
    pool, own = plain_pool(spec, dtype), KvPool(spec, BLOCKS, SIZE, dtype, quant=KV_QUANTS[name])
    conversion = conversion_to(pool, spec, f"{name} of {plain_name(dtype)}")
    for layer in range(spec.layers):
        for slot in range(SIZE):
            rows = pool.tensor[:, :, layer, :, slot]
            own.put(layer, torch.arange(BLOCKS), torch.full((BLOCKS,), slot), rows)
    assert conversion.block_bytes == own.block_bytes
    found = conversion.converted([3, 0])
    assert torch.equal(found, own.bytes_tensor()[[3, 0]])


@pytest.mark.parametrize("name", sorted(KV_QUANTS))
def test_the_way_there_and_back_is_within_half_a_step(
    qwen3: Reference, dtype: torch.dtype, name: str
) -> None:
    spec = read_spec(qwen3.folder)
    pool, narrow = plain_pool(spec, dtype), KvPool(spec, 2, SIZE, dtype, quant=KV_QUANTS[name])
    there = conversion_to(pool, spec, f"{name} of {plain_name(dtype)}").converted([1, 4])
    narrow.bytes_tensor().copy_(there)
    back = KvPool(spec, 2, SIZE, dtype)
    widened = conversion_to(narrow, spec, plain_name(dtype))
    assert widened.block_bytes == back.block_bytes
    back.bytes_tensor().copy_(widened.converted([0, 1]))
    own, found = pool.tensor[[1, 4]].float(), back.tensor.float()
    largest = own.abs().amax(dim=-1, keepdim=True)
    rounded = 2.0**-8 * own.abs() if dtype == torch.bfloat16 else 1e-6 * largest
    bound = BOUND[name] * (largest if name == "int8" else own.abs()) + rounded
    bound += largest * 2.0**-9 / 448 if name == "fp8_e4m3" else 0  # subnormal codes
    assert ((own - found).abs() <= bound + 1e-7).all()
    again = conversion_to(back, spec, f"{name} of {plain_name(dtype)}").converted([0, 1])
    narrow.bytes_tensor().copy_(again)
    back.bytes_tensor().copy_(widened.converted([0, 1]))
    assert (back.tensor.float() - found).abs().max() <= 2.0**-7 * largest.max()


@pytest.mark.parametrize("name", sorted(KV_QUANTS))
def test_latent_rows_have_two_scales(references: Callable[[str], Reference], name: str) -> None:
    spec = read_spec(references("deepseek-v3").folder)
    assert spec.latent is not None
    pool = plain_pool(spec, torch.bfloat16)
    narrow = KvPool(spec, 2, SIZE, torch.bfloat16, quant=KV_QUANTS[name])
    narrow.bytes_tensor().copy_(conversion_to(pool, spec, f"{name} of bfloat16").converted([2, 3]))
    back = KvPool(spec, 2, SIZE, torch.bfloat16)
    back.bytes_tensor().copy_(conversion_to(narrow, spec, "bfloat16").converted([0, 1]))
    own, found = pool.tensor[[2, 3]].float(), back.tensor.float()
    for part, other in zip(
        own.tensor_split((spec.latent.rank,), -1),
        found.tensor_split((spec.latent.rank,), -1),
        strict=True,
    ):
        largest = part.abs().amax(dim=-1, keepdim=True)
        assert ((part - other).abs() <= (BOUND[name] + 2.0**-8) * largest + 1e-7).all()


def test_the_kv_of_a_draft_model_is_copied(qwen3: Reference) -> None:
    spec = read_spec(qwen3.folder)
    draft = dataclasses.replace(spec, layers=1)
    pool = plain_pool(spec, torch.bfloat16, draft)
    found = conversion_to(pool, spec, "int8 of bfloat16").converted([4, 1])
    alone = conversion_to(plain_pool(spec, torch.bfloat16), spec, "int8 of bfloat16")
    slabs, size = pool.slab_groups[1]
    assert found.shape[1] == alone.block_bytes + slabs * size
    assert torch.equal(found[:, alone.block_bytes :], pool.bytes_tensor()[[4, 1], -slabs * size :])


def test_what_is_not_converted(qwen3: Reference) -> None:
    spec = read_spec(qwen3.folder)
    plain = KvPool(spec, 2, SIZE, torch.bfloat16)
    narrow = KvPool(spec, 2, SIZE, torch.bfloat16, quant=KV_QUANTS["int8"])
    for name in ("bfloat16", "float32", "int8 of float32", "int4 of bfloat16", ""):
        assert conversion_to(plain, spec, name) is None
    for name in ("float32", "fp8_e4m3 of bfloat16", "int8 of bfloat16"):
        assert conversion_to(narrow, spec, name) is None
    odd = dataclasses.replace(spec, head_dim=30)
    assert conversion_to(KvPool(odd, 2, SIZE, torch.bfloat16), odd, "int8 of bfloat16") is None
