"""A rank reads its share of every stored tensor, plain or quantised, and no other bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.checkpoint.checkpoint_formats import read_quantized
from baton.engine.checkpoint.rank_shards import RankShards
from baton.engine.checkpoint.shards import Shards
from baton.engine.spec.model_spec import ModelSpec
from baton.engine.spec.moe_spec import ExpertsSpec
from baton.engine.spec.quantization_config import StoredQuantization
from baton.engine.spec.rank_split import RankSplit
from baton.runtime.errors import ModelError
from tests.support import packed_weights

LAYER = "model.layers.0"


@pytest.fixture
def spec(spec_of: Callable[..., ModelSpec]) -> ModelSpec:
    return spec_of(num_attention_heads=4, num_key_value_heads=2, head_dim=16)


@pytest.fixture
def mixture(spec: ModelSpec) -> ModelSpec:
    return replace(spec, experts=ExpertsSpec((True,), 4, 2, 96))


def ranks_of(folder: Path, spec: ModelSpec, ranks: int = 2, ep: int = 1) -> list[RankShards]:
    return [RankShards(folder, spec, RankSplit(ranks, rank, ep)) for rank in range(ranks)]


def read(shards: Shards, name: str) -> torch.Tensor:
    with shards.open(name) as values:
        assert shards.find(name).shape == tuple(values.shape)
        return values.clone()


@pytest.mark.parametrize(
    ("module", "tensor", "shape", "axis"),
    [
        ("self_attn.q_proj", "weight", (64, 64), 0),
        ("self_attn.q_proj", "bias", (64,), 0),
        ("self_attn.k_proj", "weight", (32, 64), 0),
        ("self_attn.o_proj", "weight", (64, 64), 1),
        ("mlp.up_proj", "weight", (96, 64), 0),
        ("mlp.down_proj", "weight", (64, 96), 1),
        ("block_sparse_moe.experts.3.w2", "weight", (64, 96), 1),
        ("mlp.experts.0.gate_proj", "weight", (96, 64), 0),
    ],
)
def test_shares_of_a_matrix_make_the_whole(
    tmp_path: Path, spec: ModelSpec, module: str, tensor: str, shape: tuple[int, ...], axis: int
) -> None:
    name, whole = f"{LAYER}.{module}.{tensor}", torch.randn(shape)
    save_file({name: whole}, tmp_path / "model.safetensors")
    parts = [read(shards, name) for shards in ranks_of(tmp_path, spec)]
    assert torch.equal(torch.cat(parts, dim=axis), whole) and parts[0].shape == parts[1].shape


@pytest.mark.parametrize("module", ["self_attn.q_norm", "input_layernorm", "mlp.gate"])
def test_norms_and_gates_are_whole_on_every_rank(
    tmp_path: Path, spec: ModelSpec, module: str
) -> None:
    name, whole = f"{LAYER}.{module}.weight", torch.randn(6)
    save_file({name: whole}, tmp_path / "model.safetensors")
    assert all(torch.equal(read(shards, name), whole) for shards in ranks_of(tmp_path, spec))


def test_a_bias_after_the_sum_is_added_by_one_rank(tmp_path: Path, spec: ModelSpec) -> None:
    name, whole = f"{LAYER}.self_attn.o_proj.bias", torch.randn(64)
    save_file({name: whole}, tmp_path / "model.safetensors")
    first, second = (read(shards, name) for shards in ranks_of(tmp_path, spec))
    assert torch.equal(first, whole) and not second.any()


def test_fused_matrices_are_split_part_by_part(tmp_path: Path, spec: ModelSpec) -> None:
    qkv, gate_up = torch.randn(128, 64), torch.randn(192, 64)  # 4 + 2 + 2 heads of 16; 96 and 96
    names = f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.gate_up_proj.weight"
    save_file(dict(zip(names, (qkv, gate_up), strict=True)), tmp_path / "model.safetensors")
    second = ranks_of(tmp_path, spec)[1]
    rows = [*range(32, 64), *range(80, 96), *range(112, 128)]
    assert torch.equal(read(second, names[0]), qkv[rows])
    assert torch.equal(read(second, names[1]), gate_up[[*range(48, 96), *range(144, 192)]])


FORMS = {
    "awq": (StoredQuantization("awq", 4, 32, symmetric=False), packed_weights.awq),
    "gptq": (StoredQuantization("gptq", 4, 32, symmetric=False), packed_weights.gptq),
    "packed": (StoredQuantization("packed", 4, 32), packed_weights.packed),
    "int8": (StoredQuantization("int8", 8), packed_weights.int8),
    "fp8": (
        StoredQuantization("fp8", 8, 32, block_rows=32),
        partial(packed_weights.fp8, rows=32, columns=32),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("module", ["mlp.up_proj", "mlp.down_proj"])
def test_quantised_shares_have_their_scales(
    tmp_path: Path, spec: ModelSpec, form: str, module: str
) -> None:
    stored, pack = FORMS[form]
    shape = (128, 64) if module == "mlp.up_proj" else (64, 128)
    tensors, values = pack(torch.randn(shape))
    name = f"{LAYER}.{module}"
    named = {f"{name}.{key}": value.contiguous() for key, value in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    parts = []
    for shards in ranks_of(tmp_path, replace(spec, quantization=stored)):
        found = read_quantized(shards, stored, name, 64, 64)
        assert found is not None
        parts.append(found.dequantized())
    joined = torch.cat(parts, dim=0 if module == "mlp.up_proj" else 1)
    assert torch.allclose(joined, values, rtol=1e-2, atol=1e-3)


def test_a_group_that_ranks_would_cut_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    tensors, _ = packed_weights.gptq(torch.randn(64, 96))  # three groups of 32 columns
    named = {f"{LAYER}.mlp.down_proj.{key}": value for key, value in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    shards = ranks_of(tmp_path, spec)[0]
    with pytest.raises(ModelError, match="which 2 ranks cannot share"):
        shards.find(f"{LAYER}.mlp.down_proj.scales")


@pytest.mark.parametrize(
    ("module", "shape", "cut"),
    [
        ("mlp.up_proj", (112, 64), 4),  # 3.5 blocks of rows: four scales, two for each rank
        ("mlp.up_proj", (60, 64), 2),
        ("mlp.down_proj", (64, 112), 4),
    ],
)
def test_a_cut_last_block_is_not_shared(
    tmp_path: Path, spec: ModelSpec, module: str, shape: tuple[int, int], cut: int
) -> None:
    """Though the number of scales divides: a rank's rows would begin within a block."""
    tensors = {
        f"{LAYER}.{module}.weight": torch.zeros(shape).to(torch.float8_e4m3fn),
        f"{LAYER}.{module}.weight_scale_inv": torch.ones(-(-shape[0] // 32), -(-shape[1] // 32)),
    }
    assert cut in tensors[f"{LAYER}.{module}.weight_scale_inv"].shape
    save_file(tensors, tmp_path / "model.safetensors")
    in_blocks = replace(spec, quantization=FORMS["fp8"][0])
    shards = ranks_of(tmp_path, in_blocks)[1]
    with pytest.raises(ModelError, match="group of scales; reduce worker.tp"):
        shards.find(f"{LAYER}.{module}.weight_scale_inv")


def test_a_permuted_input_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    order = torch.randperm(64)
    tensors, _ = packed_weights.gptq(torch.randn(64, 64), order=order)
    named = {f"{LAYER}.mlp.down_proj.{key}": value for key, value in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="permutes columns"):
        read(ranks_of(tmp_path, spec)[0], f"{LAYER}.mlp.down_proj.g_idx")


EXPERT = "mlp.experts.{}.down_proj"


def save_experts(folder: Path, make: Callable[[], dict[str, torch.Tensor]]) -> None:
    """Write the down matrices of four experts, and a matrix of another layer."""
    named = {"model.layers.1.self_attn.q_proj.weight": torch.randn(64, 64)}
    for expert in range(4):
        for key, value in make().items():
            named[f"{LAYER}.{EXPERT.format(expert)}.{key}"] = value.contiguous()
    save_file(named, folder / "model.safetensors")


def test_ranks_of_two_groups_read_their_own_experts(tmp_path: Path, mixture: ModelSpec) -> None:
    save_experts(tmp_path, lambda: {"weight": torch.randn(64, 96)})
    whole, ranks = Shards(tmp_path), ranks_of(tmp_path, mixture, ep=2)
    for rank, shards in enumerate(ranks):
        own = [f"{LAYER}.{EXPERT.format(2 * rank + index)}.weight" for index in (0, 1)]
        assert [name for name in unread(shards) if "experts" in name] == own
        assert all(torch.equal(read(shards, name), read(whole, name)) for name in own)
    assert all("q_proj" in name for shards in ranks for name in unread(shards))


def unread(shards: Shards) -> list[str]:
    return [stored.name for stored in shards.unused()]


def test_ranks_of_a_group_share_its_experts(tmp_path: Path, mixture: ModelSpec) -> None:
    save_experts(tmp_path, lambda: {"weight": torch.randn(64, 96)})
    whole, ranks = Shards(tmp_path), ranks_of(tmp_path, mixture, ranks=4, ep=2)
    for expert, holders in ((1, ranks[:2]), (2, ranks[2:])):
        name = f"{LAYER}.{EXPERT.format(expert)}.weight"
        parts = [read(shards, name) for shards in holders]
        assert torch.equal(torch.cat(parts, dim=1), read(whole, name))


@pytest.mark.parametrize("form", FORMS)
def test_quantised_experts_stay_whole(tmp_path: Path, mixture: ModelSpec, form: str) -> None:
    """Three groups of scales, which two ranks could not share."""
    stored, pack = FORMS[form]
    save_experts(tmp_path, lambda: pack(torch.randn(64, 96))[0])
    module = f"{LAYER}.{EXPERT.format(3)}"
    wanted = read_quantized(Shards(tmp_path), stored, module, 64, 96)
    found = read_quantized(ranks_of(tmp_path, mixture, ep=2)[1], stored, module, 64, 96)
    assert found is not None and wanted is not None
    assert torch.equal(found.dequantized(), wanted.dequantized())


def test_a_permuted_input_needs_whole_experts(tmp_path: Path, mixture: ModelSpec) -> None:
    save_experts(
        tmp_path, lambda: packed_weights.gptq(torch.randn(64, 96), order=torch.randperm(96))[0]
    )
    name = f"{LAYER}.{EXPERT.format(2)}.g_idx"
    whole, shards = Shards(tmp_path), ranks_of(tmp_path, mixture, ep=2)[1]
    assert torch.equal(read(shards, name), read(whole, name))
    with pytest.raises(ModelError, match="set worker.tp to 1 or raise worker.ep"):
        read(ranks_of(tmp_path, mixture)[1], name)
