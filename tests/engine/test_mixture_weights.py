"""The names of experts and latents in files, as transformers writes and releases have them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.shards import Shards
from baton.engine.checkpoint.weights import load_weights
from baton.engine.cpu.linear import CpuMatrices
from baton.engine.model.experts import ExpertWeights, ListedExperts
from baton.engine.model.mla import LatentWeights
from baton.engine.model.quantized_weight import quantize_int4, quantize_int8
from baton.engine.model.weights import MlpWeights
from baton.engine.scheduling.batch import Slice
from baton.engine.spec.model_spec import read_spec
from baton.engine.spec.quantization_config import LoadQuantization
from baton.engine.spec.rank_split import RankSplit
from baton.runtime.errors import ModelError
from tests.support.model_story import ModelStory, random_prompt
from tests.support.small_models import Reference


def load(folder, dtype=torch.float32):
    return load_weights(folder, read_spec(folder), dtype, CpuMatrices())


@pytest.fixture
def copied(
    references: Callable[[str], Reference], tmp_path: Path
) -> Callable[[str, Callable[[dict[str, torch.Tensor]], object]], Path]:
    """The folder of a model, changed by `change(tensors)`."""

    def copy(name, change):
        folder = shutil.copytree(references(name).folder, tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return copy


@pytest.mark.parametrize(
    ("name", "released"),
    [
        ("mixtral", "model.layers.2.block_sparse_moe.experts.3.w2.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("qwen3-moe", "model.layers.0.mlp.experts.5.gate_proj.weight"),
        ("deepseek-v2", "model.layers.1.mlp.shared_experts.up_proj.weight"),
        ("deepseek-v2", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"),
        ("deepseek-v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek-v3", "model.layers.1.self_attn.q_b_proj.weight"),
    ],
)
def test_transformers_writes_the_names_of_released_files(
    copied: Callable[[str, Callable[[dict[str, torch.Tensor]], object]], Path],
    name: str,
    released: str,
) -> None:
    folder = copied(name, lambda tensors: tensors.pop(released))
    with pytest.raises(ModelError, match=released.replace(".", r"\.")):
        load(folder)


def test_experts_are_those_of_the_file(references: Callable[[str], Reference]) -> None:
    reference = references("mixtral")
    tensors = load_file(reference.folder / "model.safetensors")
    weights = load(reference.folder).layers[1].mlp
    assert isinstance(weights, ExpertWeights)
    assert isinstance(weights.experts, ListedExperts)
    assert (len(weights.experts.gate_up), len(weights.experts.down)) == (4, 4)
    assert weights.shared is None
    base = "model.layers.1.block_sparse_moe."
    x = torch.randn(3, 64)
    both = [tensors[f"{base}experts.2.{name}.weight"] for name in ("w1", "w3")]
    torch.testing.assert_close(weights.experts.gate_up[2](x), x @ torch.cat(both).T)
    torch.testing.assert_close(weights.gate(x), x @ tensors[f"{base}gate.weight"].T)


def test_a_rank_reads_no_expert_of_others(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = references("deepseek-v2").folder
    opened = set()
    open_whole = Shards.open
    monkeypatch.setattr(
        Shards, "open", lambda shards, name: opened.add(name) or open_whole(shards, name)
    )
    split = RankSplit(ranks=2, rank=1, ep=2)
    layers = load_weights(
        folder, read_spec(folder), torch.float32, CpuMatrices(), split=split
    ).layers
    tensors = load_file(folder / "model.safetensors")
    read = {name for name in opened if ".experts." in name}
    assert read == {
        name
        for name in tensors
        if (found := re.search(r"\.experts\.(\d+)\.", name)) and int(found[1]) >= 3
    }
    experts, x = layers[1].mlp.experts, torch.randn(2, 40)
    assert experts.first == 3 and len(experts.down) == 3
    down = tensors["model.layers.1.mlp.experts.4.down_proj.weight"]
    torch.testing.assert_close(experts.down[1](x), x @ down.T)


def test_on_a_device_experts_are_stacked(references: Callable[[str], Reference]) -> None:
    pytest.importorskip("triton")
    from baton.engine.triton.matrices import TritonMatrices

    folder = references("mixtral").folder
    tensors = load_file(folder / "model.safetensors")
    spec, device = read_spec(folder), torch.device("cpu")
    experts = (
        load_weights(folder, spec, torch.float32, TritonMatrices(device)).layers[1].mlp.experts
    )
    base = "model.layers.1.block_sparse_moe.experts."
    for expert in range(4):
        both = torch.cat([tensors[f"{base}{expert}.{name}.weight"] for name in ("w1", "w3")])
        assert torch.equal(experts.gate_up[expert], both)
        assert torch.equal(experts.down[expert], tensors[f"{base}{expert}.w2.weight"])


@pytest.mark.parametrize("made", ["int8", "int4"])
def test_on_a_device_quantised_experts_are_stacked(
    references: Callable[[str], Reference], made: LoadQuantization
) -> None:
    pytest.importorskip("triton")
    from baton.engine.triton.matrices import TritonMatrices

    folder = references("mixtral").folder
    how = TritonMatrices(torch.device("cpu")), None, made
    experts = load_weights(folder, read_spec(folder), torch.float32, *how).layers[1].mlp.experts
    tensors = load_file(folder / "model.safetensors")
    base = "model.layers.1.block_sparse_moe.experts."
    for expert in range(4):
        both = torch.cat([tensors[f"{base}{expert}.{name}.weight"] for name in ("w1", "w3")])
        down = tensors[f"{base}{expert}.w2.weight"]
        for stack, plain in ((experts.gate_up, both), (experts.down, down)):
            wanted = quantize_int8(plain) if made == "int8" else quantize_int4(plain, stack.group)
            assert stack.code_dtype == made and len(stack) == 4
            assert torch.equal(stack.codes[expert], wanted.codes)
            assert torch.equal(stack.scales[expert], wanted.scales)
            assert made == "int8" or torch.equal(stack.zeros[expert], wanted.zeros)


@pytest.mark.parametrize("made", ["int8", "int4"])
def test_quantised_experts_compute_nearly_the_same(
    references: Callable[[str], Reference], made: LoadQuantization
) -> None:
    folder = references("mixtral").folder
    x = torch.randn(9, 64)
    plain = load(folder).layers[0].mlp
    made_so = load_weights(
        folder, read_spec(folder), torch.float32, CpuMatrices(), quantization=made
    )
    smaller = made_so.layers[0].mlp
    torch.testing.assert_close(smaller.gate(x), plain.gate(x))  # the choice stays exact
    for one, two in zip(plain.experts.down, smaller.experts.down, strict=True):
        inner = torch.randn(5, 96)
        error = (one(inner) - two(inner)).norm() / one(inner).norm()
        assert 0 < error < (0.02 if made == "int8" else 0.2)


def test_dense_and_sparse_layers(references: Callable[[str], Reference]) -> None:
    layers = load(references("qwen3-moe-mixed").folder).layers
    assert [type(layer.mlp) for layer in layers] == [
        MlpWeights,
        ExpertWeights,
        MlpWeights,
        MlpWeights,
    ]


def test_the_choice_stays_in_float32(references: Callable[[str], Reference]) -> None:
    reference = references("deepseek-v3")
    tensors = load_file(reference.folder / "model.safetensors")
    layer = load(reference.folder, torch.bfloat16).layers[2]
    assert isinstance(layer.qkv, LatentWeights)
    assert layer.qkv.up.dtype == layer.input_norm.dtype == torch.bfloat16
    wanted = tensors["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert torch.equal(layer.mlp.correction, wanted)
    x = torch.randn(3, 64)
    gate = tensors["model.layers.2.mlp.gate.weight"]
    torch.testing.assert_close(layer.mlp.gate(x), x @ gate.T)


def test_latents_of_the_file(references: Callable[[str], Reference]) -> None:
    reference = references("deepseek-v2-groups")
    tensors = load_file(reference.folder / "model.safetensors")
    weights = load(reference.folder).layers[0].qkv
    base = "model.layers.0.self_attn."
    x = torch.randn(2, 64)
    first = torch.cat(
        [tensors[f"{base}{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    )
    torch.testing.assert_close(weights.inputs(x), x @ first.T)
    assert torch.equal(weights.up.flatten(0, 1), tensors[f"{base}kv_b_proj.weight"])
    assert weights.up.shape == (4, 12 + 16, 32)


def test_missing_expert_is_named(
    copied: Callable[[str, Callable[[dict[str, torch.Tensor]], object]], Path],
) -> None:
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    folder = copied("qwen3-moe", lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=r"experts\.4\.up_proj\.weight"):
        load(folder)


def test_more_experts_than_config_says_are_refused(
    references: Callable[[str], Reference], tmp_path: Path
) -> None:
    folder = shutil.copytree(references("qwen3-moe").folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["num_local_experts"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"mlp\.gate\.weight|experts\.5\."):
        load(folder)


def test_expert_of_a_wrong_shape_names_both_shapes(
    copied: Callable[[str, Callable[[dict[str, torch.Tensor]], object]], Path],
) -> None:
    def change(tensors):
        tensors["model.layers.1.mlp.experts.0.down_proj.weight"] = torch.ones(64, 41)

    with pytest.raises(ModelError, match=r"experts\.0\.down_proj\.weight.*\[64, 41\].*\[64, 40\]"):
        load(copied("deepseek-v2", change))


def test_only_layers_that_predict_further_tokens_are_ignored(
    copied: Callable[[str, Callable[[dict[str, torch.Tensor]], object]], Path],
) -> None:
    """The config of the small model names one such layer, as the released ones do."""

    def add(index):
        extra = {f"model.layers.{index}.eh_proj.weight": torch.ones(2, 2)}
        return lambda tensors: tensors.update(extra)

    load(copied("deepseek-v3", add(3)))
    with pytest.raises(ModelError, match=r"layers\.4\.eh_proj"):
        load(copied("deepseek-v3-plain", add(4)))


def in_blocks(weight, size):
    """As DeepSeek-V3 is released: FP8 with one scale for each block of `size` x `size`, of which
    the last may be cut."""
    rows, columns = weight.shape
    filled = functional.pad(weight, (0, -columns % size, 0, -rows % size))
    blocks = filled.view(filled.shape[0] // size, size, -1, size)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
    stored = (blocks / scales[:, None, :, None]).view_as(filled)[:rows, :columns]
    return stored.to(torch.float8_e4m3fn).contiguous(), scales


def test_a_model_in_blocks_of_fp8_computes_nearly_the_same(
    copied: Callable[[str, Callable[[dict[str, torch.Tensor]], object]], Path],
    references: Callable[[str], Reference],
) -> None:
    """All products but the gate's, 40 rows of latents (two blocks and a half) among them."""

    def change(tensors):
        for name in [name for name in tensors if "_proj" in name]:
            stored, scales = in_blocks(tensors[name], 16)
            tensors |= {name: stored, f"{name}_scale_inv": scales}

    folder = copied("deepseek-v3", change)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    up = load(folder).layers[0].qkv.up
    exact = load(references("deepseek-v3").folder).layers[0].qkv.up
    assert 0 < (up - exact).norm() / exact.norm() < 0.04
    tokens, reported = random_prompt(40), ModelStory(folder)
    (logits,) = reported.logits(Slice(tokens, 0, reported.blocks(40)))
    wanted = references("deepseek-v3").logits(tokens)
    error = (logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert 0 < error.median() < 0.3
