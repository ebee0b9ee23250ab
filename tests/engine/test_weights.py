from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.weights import load_weights, source_dtype
from baton.engine.cpu.linear import CpuMatrices
from baton.engine.scheduling.batch import Slice
from baton.engine.spec.model_spec import read_spec
from baton.engine.spec.quantization_config import LoadQuantization
from baton.runtime.errors import ConfigError, ModelError
from tests.support.json_values import JsonObject
from tests.support.model_story import ModelStory, random_prompt
from tests.support.small_models import Reference


@pytest.fixture
def folder(qwen3: Reference, tmp_path: Path) -> Path:
    return shutil.copytree(qwen3.folder, tmp_path / "model")


def load(folder, dtype=torch.float32):
    return load_weights(folder, read_spec(folder), dtype, CpuMatrices())


def edit(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("name", ["qwen3", "llama-llama3-rope"])
def test_shards_compute_as_one_file(
    references: Callable[[str], Reference], name: str, tmp_path: Path
) -> None:
    reference, tokens = references(name), random_prompt(20)
    reference.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    sharded, single = ModelStory(tmp_path), ModelStory(reference.folder)
    (ours,) = sharded.logits(Slice(tokens, 0, sharded.blocks(20)))
    (theirs,) = single.logits(Slice(tokens, 0, single.blocks(20)))
    assert torch.equal(ours, theirs)


def test_tied_head_is_the_embedding(references: Callable[[str], Reference]) -> None:
    weights = load(references("qwen2").folder)
    x = torch.randn(3, 64)
    torch.testing.assert_close(weights.head(x), x @ weights.embedding.T)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
def test_every_source_is_converted(folder: Path, source: torch.dtype, target: torch.dtype) -> None:
    name = "model.layers.0.input_layernorm.weight"
    wanted = load_file(folder / "model.safetensors")[name].to(source).to(target)
    edit(folder, lambda tensors: tensors.update({k: v.to(source) for k, v in tensors.items()}))
    assert source_dtype(folder, read_spec(folder)) == source
    weights = load(folder, target)
    assert torch.equal(weights.layers[0].input_norm, wanted)
    assert weights.embedding.dtype == target


def test_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is in none"):
        load(folder)


def test_missing_head_of_an_untied_model_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load(folder)


def test_wrong_shape_names_file_tensor_and_both_shapes(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(
        ModelError, match=r"model\.safetensors: tensor model\.norm\.weight .*\[65\].*\[64\]"
    ):
        load(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_value_that_is_not_finite_is_refused(folder: Path, bad: float) -> None:
    def spoil(tensors):
        tensors["model.layers.2.self_attn.k_proj.weight"][3, 4] = bad

    edit(folder, spoil)
    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\.k_proj\.weight .* not finite"):
        load(folder)


def test_large_finite_values_whose_sum_overflows_are_accepted(folder: Path) -> None:
    edit(folder, lambda tensors: tensors["model.norm.weight"].fill_(3e38))
    assert load(folder).final_norm[0] == 3e38


def test_integer_weights_are_refused_by_kind(folder: Path) -> None:
    edit(
        folder,
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
    )
    with pytest.raises(ModelError, match="dtype I8"):
        load(folder)


def test_missing_shard_is_named_with_a_tensor_it_holds(qwen3: Reference, tmp_path: Path) -> None:
    qwen3.model.save_pretrained(tmp_path, max_shard_size="60KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=rf"{gone.name}: shard of .* is missing \(it has model"):
        load(tmp_path)


def test_index_that_points_out_of_the_folder_is_refused(qwen3: Reference, tmp_path: Path) -> None:
    qwen3.model.save_pretrained(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ModelError, match="not a plain file name"):
        load(tmp_path)


def test_empty_index_is_refused(qwen3: Reference, tmp_path: Path) -> None:
    qwen3.model.save_pretrained(tmp_path, max_shard_size="60KB")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ModelError, match="weight_map: is empty"):
        load(tmp_path)


def test_folder_without_safetensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="use a model with safetensors"):
        load(folder)


def test_cut_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor .* \[\d.*it is truncated"):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2, "layer_types": None},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    ],
)
def test_weights_that_config_json_has_no_use_for_are_refused(
    folder: Path, changes: JsonObject
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.\d.* \[\d+.*config\.json"):
        load(folder)


def test_a_bias_that_no_field_announces_is_refused(folder: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.bias"
    edit(folder, lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(ModelError, match=r"o_proj\.bias \[64\] is not part of a qwen3 model of 3"):
        load(folder)


def test_spare_tensors_and_a_tied_head_are_left_alone(
    references: Callable[[str], Reference], tmp_path: Path
) -> None:
    folder = shutil.copytree(references("qwen2").folder, tmp_path / "model")
    spare = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit(folder, lambda tensors: tensors.update(spare | {"lm_head.weight": torch.zeros(199, 64)}))
    weights = load(folder)
    x = torch.randn(3, 64)
    torch.testing.assert_close(weights.head(x), x @ weights.embedding.T)


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"num_hidden_layers": 4, "layer_types": None}, r"model\.layers\.3\."),
        ({"vocab_size": 200}, r"embed_tokens\.weight has shape \[199, 64\].*\[200, 64\]"),
        ({"num_attention_heads": 8}, r"q_proj\.weight has shape \[128, 64\].*\[256, 64\]"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight has shape \[64, 64\].*\[128, 64\]"),
        ({"intermediate_size": 80}, r"proj\.weight has shape .*80"),
    ],
)
def test_config_that_contradicts_the_weights_is_refused(
    folder: Path, changes: JsonObject, tensor: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=tensor):
        load(folder)


def test_progress_ends_with_all_bytes(folder: Path) -> None:
    reported = []
    load_weights(
        folder, read_spec(folder), torch.float32, CpuMatrices(), lambda *step: reported.append(step)
    )
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert reported[-1] == (total, total)
    assert all(a < b for (a, _), (b, _) in zip(reported, reported[1:], strict=False))


def test_sizes_that_no_memory_holds_are_named(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 1 << 50}))
    with pytest.raises(ModelError, match=r"no memory for a tensor .*config\.json"):
        load(folder)


@pytest.mark.parametrize(("made", "bound"), [("int8", 0.025), ("int4", 0.25)])
def test_weights_made_smaller_answer_nearly_alike(
    references: Callable[[str], Reference], tmp_path: Path, made: str, bound: float
) -> None:
    """Of a size at which a random model's layers do not throw small differences about."""
    folder, tokens = (
        shutil.copytree(references("llama").folder, tmp_path / "model"),
        random_prompt(30),
    )

    def calm(tensors):
        for name in [name for name in tensors if "_proj." in name]:
            tensors[name] *= 0.2

    edit(folder, calm)
    ours, theirs = ModelStory(folder, quantization=made), ModelStory(folder)
    (found,) = ours.logits(Slice(tokens, 0, ours.blocks(30)))
    (wanted,) = theirs.logits(Slice(tokens, 0, theirs.blocks(30)))
    assert 0 < (found - wanted).norm() < bound * wanted.norm()


def test_columns_that_no_group_divides_are_refused_for_int4(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 80}))

    def narrow(tensors):
        for name in [name for name in tensors if ".mlp." in name]:
            axis = 1 if "down" in name else 0
            tensors[name] = tensors[name].narrow(axis, 0, 80).contiguous()

    edit(folder, narrow)
    load_weights(folder, read_spec(folder), torch.float32, CpuMatrices(), None, "int8")
    with pytest.raises(ModelError, match=r"down_proj\.weight \[64, 80\] has 80 columns"):
        load_weights(folder, read_spec(folder), torch.float32, CpuMatrices(), None, "int4")


@pytest.mark.parametrize("made", ["int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_cannot_be_quantised(
    folder: Path, made: LoadQuantization, bad: float
) -> None:
    edit(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][5].fill_(bad))
    with pytest.raises(ModelError, match=r"up_proj\.weight \[96, 64\] has values that are not"):
        load_weights(folder, read_spec(folder), torch.float32, CpuMatrices(), None, made)


def test_quantised_weights_are_not_quantised_again(folder: Path) -> None:
    path = folder / "config.json"
    config = {"quant_method": "fp8"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=r"worker\.quantization is 'int8'.*are quantised already"):
        load_weights(folder, read_spec(folder), torch.float32, CpuMatrices(), None, "int8")


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight", [96, 64]),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", [192, 64]),
        ("gemma2", "model.layers.2.pre_feedforward_layernorm.weight", [64]),
        ("gemma2", "model.layers.0.post_feedforward_layernorm.weight", [64]),
        ("gemma3", "model.layers.1.self_attn.q_norm.weight", [32]),
        ("gemma3", "model.norm.weight", [64]),
        ("llama-mlp-biased", "model.layers.1.mlp.down_proj.bias", [64]),
    ],
)
def test_tensors_of_each_family_are_held_to_their_shapes(
    references: Callable[[str], Reference], tmp_path: Path, name: str, tensor: str, shape: list[int]
) -> None:
    folder = shutil.copytree(references(name).folder, tmp_path / "model")
    grown = [shape[0] + 1, *shape[1:]]
    edit(folder, lambda tensors: tensors.update({tensor: torch.zeros(grown)}))
    with pytest.raises(ModelError) as wrong:
        load(folder)
    assert all(part in str(wrong.value) for part in ("model.safetensors", tensor))
    assert str(grown) in str(wrong.value) and f"asks for {shape}" in str(wrong.value)
    edit(folder, lambda tensors: tensors.pop(tensor))
    with pytest.raises(ModelError) as missing:
        load(folder)
    assert str(folder) in str(missing.value) and tensor in str(missing.value)
    assert str(shape) in str(missing.value)


def test_a_value_beyond_float16_is_refused_there_alone(folder: Path) -> None:
    def grow(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][1, 2] = 7e4

    edit(folder, grow)
    load(folder, torch.bfloat16)
    with pytest.raises(ModelError, match=r"up_proj\.weight .* not finite in float16; .*float32"):
        load(folder, torch.float16)
