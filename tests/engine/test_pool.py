from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from baton.engine.memory.kv_pool import KvPool, block_bytes, blocks_for
from baton.engine.memory.kv_quant import FP8_E4M3, INT8, KvQuant
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.runtime.errors import ConfigError
from tests.support.model_story import ModelStory, greedy_slice, random_prompt
from tests.support.small_models import Reference


@pytest.fixture
def spec(qwen3: Reference) -> ModelSpec:
    return read_spec(qwen3.folder)  # 3 layers, 2 KV heads of 32


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_shape_and_bytes(spec: ModelSpec, dtype: torch.dtype, width: int) -> None:
    pool = KvPool(spec, 5, 8, dtype)
    assert pool.tensor.shape == (5, 2, 3, 2, 8, 32)
    assert pool.tensor.is_contiguous()
    assert pool.block_bytes == 2 * 3 * 2 * 8 * 32 * width == block_bytes(spec, 8, dtype)
    assert pool.slabs == 2
    assert pool.bytes_view().shape == (5, pool.block_bytes)
    assert not pool.bytes_view().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_view_shares_memory_both_ways(spec: ModelSpec, dtype: torch.dtype) -> None:
    pool = KvPool(spec, 4, 8, dtype)
    view = pool.bytes_view()
    assert view.dtype == np.uint8
    assert view.flags.c_contiguous
    assert view.flags.writeable
    assert view.ctypes.data == pool.tensor.data_ptr()
    pool.tensor[2] = 1.5
    assert view[2].any()
    assert not view[[0, 1, 3]].any()
    view[3] = view[2]
    assert bool((pool.tensor[3] == 1.5).all())


def test_a_head_is_one_run_of_a_block(spec: ModelSpec) -> None:
    pool = KvPool(spec, 2, 8)
    pool.tensor[1, 1] = 2.0
    slab = pool.block_bytes // pool.slabs
    assert not pool.bytes_view()[1, :slab].any()
    assert bool((pool.bytes_view()[1, slab:].view(np.float32) == 2.0).all())


def test_a_latent_pool_has_one_slab_and_no_pair_of_key_and_value(
    references: Callable[[str], Reference],
) -> None:
    spec = read_spec(references("deepseek-v2").folder)  # 3 layers, rank 32, 8 rotated
    pool = KvPool(spec, 5, 8, torch.bfloat16)
    assert pool.tensor.shape == (5, 1, 3, 8, 40)
    assert pool.block_bytes == 3 * 8 * 40 * 2 == block_bytes(spec, 8, torch.bfloat16)
    assert pool.slabs == spec.kv_heads == 1
    assert pool.bytes_view().shape == (5, pool.block_bytes)
    pool.tensor[3] = 1.0
    pool.copy_block(3, 0)
    assert bool((pool.tensor[0] == 1.0).all())
    assert not pool.bytes_view()[[1, 2, 4]].any()


def test_a_latent_pool_as_pairs_is_the_same_memory_twice(
    references: Callable[[str], Reference],
) -> None:
    pool = KvPool(read_spec(references("deepseek-v2").folder), 5, 8)
    pairs = pool.as_pairs()
    assert pairs.tensor.shape == (5, 1, 3, 2, 8, 40)
    pool.tensor.normal_()
    for half in (0, 1):
        assert torch.equal(pairs.tensor[:, :, :, half], pool.tensor)
        assert pairs.tensor[:, :, :, half].data_ptr() == pool.tensor.data_ptr()


def test_too_small_a_budget_for_latents_shows_their_arithmetic(
    references: Callable[[str], Reference],
) -> None:
    spec = read_spec(references("deepseek-v2").folder)
    with pytest.raises(ConfigError, match=r"1 latent x 3 layers x 16 tokens x 40 x 4 bytes = 7680"):
        blocks_for(spec, 16, torch.float32, 100)


@pytest.mark.parametrize("codes", [INT8, FP8_E4M3], ids=["int8", "fp8"])
def test_an_eight_bit_pool_keeps_scales_at_the_end_of_each_head(
    spec: ModelSpec, codes: KvQuant
) -> None:
    pool = KvPool(spec, 5, 8, torch.bfloat16, quant=codes)
    assert pool.tensor.shape == (5, 2, 3, 2, 8, 32) and pool.tensor.dtype == codes.dtype
    assert pool.scales.shape == (5, 2, 3, 2, 8) and pool.scales.dtype == torch.float32
    slab = 3 * 2 * 8 * (32 + 4)
    assert pool.block_bytes == 2 * slab == block_bytes(spec, 8, torch.bfloat16, codes)
    assert pool.kv_dtype == f"{codes.name} of bfloat16"
    view = pool.bytes_view()
    assert view.shape == (5, 2 * slab) and view.flags.c_contiguous and not view.any()
    pool.scales[3, 1] = 1.5
    assert not view[3, : slab + 3 * 2 * 8 * 32].any() and not view[[0, 1, 2, 4]].any()
    assert bool((view[3, slab + 3 * 2 * 8 * 32 :].view(np.float32) == 1.5).all())
    pool.tensor[3, 0] = 1
    assert view[3, : 3 * 2 * 8 * 32].all() and not view[3, 3 * 2 * 8 * 32 : slab].any()


@pytest.mark.parametrize("codes", [None, INT8, FP8_E4M3], ids=["plain", "int8", "fp8"])
def test_what_is_put_is_taken_and_touches_nothing_else(
    spec: ModelSpec, codes: KvQuant | None
) -> None:
    pool = KvPool(spec, 5, 8, torch.float32, quant=codes)
    blocks, slots = torch.tensor([3, 3, 0]), torch.tensor([7, 0, 2])
    kv = torch.randn(3, 2, 2, 32)
    pool.put(1, blocks, slots, kv)
    before = pool.memory.clone()
    found = pool.take(1, torch.tensor([[3], [0]]))  # [2, 1, kv_head, k|v, token, dim]
    assert found.shape == (2, 1, 2, 2, 8, 32) and found.dtype == torch.float32
    rows = torch.stack((found[0, 0, :, :, 7], found[0, 0, :, :, 0], found[1, 0, :, :, 2]))
    bound = {None: 0.0, INT8: 0.5 / 127, FP8_E4M3: 1 / 16}[codes]
    assert ((rows - kv).abs() <= bound * kv.abs().amax(-1, keepdim=True)).all()
    pool.put(1, blocks, slots, torch.zeros(3, 2, 2, 32))
    assert not pool.memory.any()
    pool.put(1, blocks, slots, kv)
    assert torch.equal(pool.memory, before)


def test_a_pool_in_eight_bits_holds_more_blocks_and_shows_why(spec: ModelSpec) -> None:
    each = block_bytes(spec, 16, torch.bfloat16, INT8)
    assert each == 2 * 3 * 2 * 16 * 36
    assert blocks_for(spec, 16, torch.bfloat16, 50 * each, INT8) == 50
    with pytest.raises(ConfigError, match=r"16 tokens x \(32 codes \+ a scale of 4 bytes\) = 6912"):
        blocks_for(spec, 16, torch.bfloat16, 100, INT8)


def test_models_that_eight_bits_do_not_fit(
    spec: ModelSpec, references: Callable[[str], Reference]
) -> None:
    latent = read_spec(references("deepseek-v2").folder)
    with pytest.raises(ConfigError, match=r"pool\.kv_dtype is int8: 1092 bytes.*pool\.block_size"):
        block_bytes(dataclasses.replace(latent, head_dim=44), 7, torch.float32, INT8)
    odd = dataclasses.replace(spec, head_dim=30)
    with pytest.raises(ConfigError, match=r"pool\.kv_dtype is fp8_e4m3.*heads have 30 .*give auto"):
        KvPool(odd, 4, 8, quant=FP8_E4M3)


@pytest.mark.parametrize("codes", [INT8, FP8_E4M3])
def test_a_latent_row_in_eight_bits_has_two_scales(
    references: Callable[[str], Reference], codes: KvQuant
) -> None:
    spec = read_spec(references("deepseek-v2").folder)  # 3 layers, rank 32, 8 rotated
    pool = KvPool(spec, 5, 8, torch.bfloat16, quant=codes)
    assert pool.block_bytes == 3 * 8 * (40 + 2 * 4) == block_bytes(spec, 8, torch.bfloat16, codes)
    assert pool.tensor.shape == (5, 1, 3, 8, 40) and pool.tensor.dtype == codes.dtype
    assert pool.scales.shape == (5, 1, 3, 8, 2)
    pool.scales[4, 0, 2, 7, 1] = 1.0  # the last number of the last slab
    assert pool.bytes_view()[4, -4:].view(np.float32) == 1.0 and not pool.bytes_view()[:4].any()
    with pytest.raises(ConfigError, match=r"16 tokens x \(40 codes \+ 2 scales of 4 bytes\)"):
        blocks_for(spec, 16, torch.bfloat16, 100, codes)


def test_copy_of_a_block_in_eight_bits_copies_its_scales(spec: ModelSpec) -> None:
    pool = KvPool(spec, 3, 8, quant=INT8)
    kv = torch.randn(8, 2, 2, 32)
    pool.put(2, torch.full((8,), 2), torch.arange(8), kv)
    pool.copy_block(2, 0)
    here, there = pool.take(2, torch.tensor([0, 2]))
    assert torch.equal(here, there) and here.any()


def test_copy_block(spec: ModelSpec) -> None:
    pool = KvPool(spec, 3, 8)
    pool.tensor.normal_()
    before = pool.tensor.clone()
    pool.copy_block(2, 0)
    assert torch.equal(pool.tensor[0], before[2])
    assert torch.equal(pool.tensor[1:], before[1:])


@pytest.mark.parametrize(("source", "target"), [(-1, 0), (0, 3), (3, 0), (0, -1)])
def test_copy_of_a_block_outside_the_pool(spec: ModelSpec, source: int, target: int) -> None:
    with pytest.raises(ValueError, match="pool of 3 blocks"):
        KvPool(spec, 3, 8).copy_block(source, target)


@pytest.mark.parametrize(("blocks", "size"), [(0, 8), (-1, 8), (4, 0)])
def test_sizes_that_make_no_pool(spec: ModelSpec, blocks: int, size: int) -> None:
    with pytest.raises(ConfigError, match=r"pool\.blocks"):
        KvPool(spec, blocks, size)


def test_more_than_the_system_has(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="give fewer blocks"):
        KvPool(spec, 1 << 40, 16)


def test_blocks_for_a_budget(spec: ModelSpec) -> None:
    each = block_bytes(spec, 16, torch.float32)
    assert blocks_for(spec, 16, torch.float32, 100 * each) == 100
    assert blocks_for(spec, 16, torch.float32, 101 * each - 1) == 100
    assert blocks_for(spec, 16, torch.bfloat16, 100 * each) == 200


@pytest.mark.parametrize("budget", [-5, 0, 31 * 24576])
def test_too_small_a_budget_shows_the_arithmetic(spec: ModelSpec, budget: int) -> None:
    with pytest.raises(ConfigError) as caught:
        blocks_for(spec, 16, torch.float32, budget)
    for part in ("2 KV heads", "3 layers", "16 tokens", "24576 bytes", "pool.memory_fraction"):
        assert part in str(caught.value)
    assert blocks_for(spec, 16, torch.float32, 32 * 24576) == 32


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_blocks_of_codes_moved_as_bytes_continue_the_sequence(
    qwen3: Reference, kv_dtype: str
) -> None:
    prompt = random_prompt(45, seed=8)
    alone = ModelStory(qwen3.folder, seed=3, kv_dtype=kv_dtype)
    expected = alone.greedy(prompt, alone.blocks(60), 13)
    granter, reader = (ModelStory(qwen3.folder, seed=seed, kv_dtype=kv_dtype) for seed in (1, 2))
    theirs, ours = granter.blocks(45), reader.blocks(60)
    first = granter.draw(greedy_slice(prompt, 0, theirs))
    source, target = granter.runner.pool.bytes_view(), reader.runner.pool.bytes_view()
    target[ours[: len(theirs)]] = source[theirs]
    assert [*first, *reader.greedy([*prompt, *first], ours, 12, start=45)] == expected


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_blocks_moved_as_bytes_continue_the_sequence(
    references: Callable[[str], Reference], name: str
) -> None:
    """What a handoff does: whole blocks from one pool to other places of another."""
    reference, prompt = references(name), random_prompt(45, seed=8)
    granter, reader = (ModelStory(reference.folder, seed=seed) for seed in (1, 2))
    theirs, ours = granter.blocks(45), reader.blocks(60)
    first = granter.draw(greedy_slice(prompt, 0, theirs))
    source, target = granter.runner.pool.bytes_view(), reader.runner.pool.bytes_view()
    target[ours[: len(theirs)]] = source[theirs]
    tokens = [*prompt, *first]
    rest = reader.greedy(tokens, ours, 12, start=45)
    assert [*first, *rest] == reference.greedy(prompt, 13)


@pytest.fixture
def draft(references: Callable[[str], Reference]) -> ModelSpec:
    return read_spec(references("llama").folder)  # 3 layers, 2 KV heads of 16


@pytest.mark.parametrize("codes", [None, INT8])
def test_a_draft_group_lies_in_the_same_blocks(
    spec: ModelSpec, draft: ModelSpec, codes: KvQuant | None
) -> None:
    plain = KvPool(spec, 4, 8, torch.bfloat16, quant=codes)
    pool = KvPool(spec, 4, 8, torch.bfloat16, quant=codes, draft=draft)
    assert pool.draft is not None
    own, beside = plain.block_bytes, block_bytes(draft, 8, torch.bfloat16)
    assert pool.block_bytes == own + beside
    assert pool.tensor.shape == plain.tensor.shape
    assert pool.draft.tensor.shape == (4, 2, 3, 2, 8, 16)
    assert pool.draft.quant is None
    pool.tensor.view(torch.uint8)[2].fill_(7)
    pool.draft.tensor[1] = 1.5
    view = pool.bytes_view()
    assert view.shape == (4, pool.block_bytes) and view.flags.c_contiguous
    assert view[2, : pool.tensor[2].nbytes // 2].any() and not view[2, own:].any()
    assert not view[1, :own].any() and (view[1, own:].view(np.uint16) == 0x3FC0).all()


def test_copying_a_block_copies_both_groups(spec: ModelSpec, draft: ModelSpec) -> None:
    pool = KvPool(spec, 4, 8, draft=draft)
    assert pool.draft is not None
    pool.tensor[1], pool.draft.tensor[1] = 1.0, 2.0
    pool.copy_block(1, 3)
    assert bool((pool.tensor[3] == 1.0).all()) and bool((pool.draft.tensor[3] == 2.0).all())
    assert not pool.bytes_view()[[0, 2]].any()


def test_slabs_are_counted_and_measured_for_each_group(spec: ModelSpec, draft: ModelSpec) -> None:
    pool = KvPool(spec, 2, 8, torch.bfloat16, draft=draft)
    assert pool.slab_groups == ((2, 3 * 2 * 8 * 32 * 2), (2, 3 * 2 * 8 * 16 * 2))
    assert pool.slabs == 4
    assert sum(heads * size for heads, size in pool.slab_groups) == pool.block_bytes


@pytest.mark.parametrize("codes", [None, INT8])
def test_a_view_of_heads_has_its_memory_in_whole_blocks(
    spec: ModelSpec, draft: ModelSpec, codes: KvQuant | None
) -> None:
    pool = KvPool(spec, 4, 8, torch.bfloat16, quant=codes, draft=draft)
    part = pool.of_heads(range(1, 2))
    for name in ("memory", "tensor") if codes is None else ("memory", "tensor", "scales"):
        found, whole = getattr(part, name), getattr(pool, name)
        assert found.shape[1] == 1 and found.data_ptr() == whole[:, 1:].data_ptr()
    part.memory.fill_(7)
    view, slab = pool.bytes_view(), pool.memory.shape[2]
    assert (view[:, slab : 2 * slab] == 7).all()
    assert not view[:, :slab].any() and not view[:, 2 * slab :].any()
    for each in (part, pool.draft):
        assert each is not None
        assert (each.slabs, each.slab_groups) == (pool.slabs, pool.slab_groups)
        assert each.slab_rows == pool.slab_rows
        assert each.bytes_view().shape == (4, pool.block_bytes)


def test_a_draft_makes_fewer_blocks_fit_and_the_arithmetic_shows(
    spec: ModelSpec, draft: ModelSpec
) -> None:
    budget = 1 << 22
    alone = blocks_for(spec, 16, torch.float32, budget)
    together = blocks_for(spec, 16, torch.float32, budget, draft=draft)
    each = KvPool(spec, 1, 16, draft=draft).block_bytes
    assert together == budget // each < alone
    with pytest.raises(ConfigError, match=r"2 KV heads x 3 layers x 2 x 16 .* of the draft = "):
        blocks_for(spec, 16, torch.float32, 1000, draft=draft)
