"""Checkpoints are packed here entry by entry, as each format is defined, and read back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.checkpoint_formats import read_quantized
from baton.engine.checkpoint.shards import Shards
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.scheduling.batch import Slice
from baton.engine.spec.quantization_config import Layout, StoredQuantization
from baton.runtime.errors import ModelError
from tests.support.model_story import ModelStory, random_prompt
from tests.support.packed_weights import (
    awq,
    fp8,
    gptq,
    int8,
    packed,
)
from tests.support.small_models import Reference


def awq_config(group=32):
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}


def gptq_config(bits=4, group=32, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, **more}


def compressed_config(form, **weights):
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


MODULES = ("_proj.weight", "_proj_with_mqa.weight")
SHUFFLED = torch.randperm(64, generator=torch.Generator().manual_seed(5))
GROUPS = {"strategy": "group", "group_size": 32}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
# name -> (packer, quantization_config, form, greatest error against the plain matrix)
FORMATS = {
    "awq": (awq, awq_config(), StoredQuantization("awq", 4, 32, symmetric=False), 0.10),
    "gptq": (gptq, gptq_config(), StoredQuantization("gptq", 4, 32, symmetric=False), 0.10),
    "gptq-v2": (
        lambda weight: gptq(weight, first=0),
        gptq_config(checkpoint_format="gptq_v2"),
        StoredQuantization("gptq_v2", 4, 32, symmetric=False),
        0.10,
    ),
    "gptq-int8": (
        lambda weight: gptq(weight, bits=8),
        gptq_config(bits=8),
        StoredQuantization("gptq", 8, 32, symmetric=False),
        0.008,
    ),
    "gptq-act-order": (
        lambda weight: gptq(weight, order=SHUFFLED if weight.shape[1] == 64 else None),
        gptq_config(desc_act=True),
        StoredQuantization("gptq", 4, 32, symmetric=False),
        0.10,
    ),
    "pack-int4": (
        packed,
        compressed_config("pack-quantized", num_bits=4, **GROUPS),
        StoredQuantization("packed", 4, 32),
        0.13,
    ),
    "pack-int4-zeros": (
        lambda weight: packed(weight, symmetric=False),
        compressed_config("pack-quantized", num_bits=4, symmetric=False, **GROUPS),
        StoredQuantization("packed", 4, 32, symmetric=False),
        0.10,
    ),
    "pack-int8": (
        lambda weight: packed(weight, bits=8),
        compressed_config("pack-quantized", **GROUPS),
        StoredQuantization("packed", 8, 32),
        0.008,
    ),
    "int8": (
        int8,
        compressed_config("int-quantized", strategy="channel"),
        StoredQuantization("int8", 8),
        0.012,
    ),
    "fp8-channel": (
        lambda weight: fp8(weight, name="weight_scale"),
        compressed_config("float-quantized", type="float", strategy="channel"),
        StoredQuantization("fp8", 8),
        0.035,
    ),
    "fp8-tensor": (
        lambda weight: fp8(weight, rows=weight.shape[0], name="weight_scale"),
        FP8,
        StoredQuantization("fp8", 8, block_rows=0),
        0.035,
    ),
    "fp8-blocks": (
        lambda weight: fp8(weight, rows=128, columns=128),
        {**FP8, "weight_block_size": [128, 128]},
        StoredQuantization("fp8", 8, 128, 128),
        0.035,
    ),
}


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def stored(folder, tensors):
    save_file(
        {f"m.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return Shards(folder)


def quantized_model(folder, source, name):
    """A model of format `name`, and one that holds the same values plainly."""
    pack, config, _, _ = FORMATS[name]
    plain = shutil.copytree(source, folder / "plain")
    quantized = shutil.copytree(source, folder / "quantized")
    tensors, values = load_file(plain / "model.safetensors"), {}
    kept = dict(tensors)
    for module in [key.removesuffix(".weight") for key in tensors if key.endswith(MODULES)]:
        parts, values[f"{module}.weight"] = pack(kept.pop(f"{module}.weight"))
        kept.update({f"{module}.{part}": tensor for part, tensor in parts.items()})
    save_file(
        tensors | {key: value.contiguous() for key, value in values.items()},
        plain / "model.safetensors",
    )
    save_file(kept, quantized / "model.safetensors")
    path = quantized / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return quantized, plain


def test_four_bits_by_hand(tmp_path: Path) -> None:
    """One row of eight columns: codes 0 to 7 over a zero point of 3, at a scale of 0.5."""
    tensors = {
        "qweight": torch.tensor([[0x76543210]], dtype=torch.int32),
        "qzeros": torch.tensor([[2]], dtype=torch.int32),
        "scales": torch.tensor([[0.5]], dtype=torch.float16),
    }
    found = read_quantized(stored(tmp_path, tensors), StoredQuantization("gptq", 4, 8), "m", 1, 8)
    assert found.dequantized().tolist() == [[-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]]
    assert found.codes.tolist() == [[0x10, 0x32, 0x54, 0x76]]


@pytest.mark.parametrize(
    ("bits", "word", "column"),
    [(4, 0x76543210, range(8)), (8, 0x03020100, range(4))],
)
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_a_zero_point_of_0_is_stored_as_the_highest_code(
    tmp_path: Path, bits: int, word: int, column: range, layout: Layout
) -> None:
    """Version 1 has room for nothing else: less one it wraps, and read back it wraps again. One
    beyond the highest code is no zero point that a writer makes. Version 2 means what it says."""
    highest = (1 << bits) - 1
    tensors = {
        "qweight": torch.tensor([[word]], dtype=torch.int32),
        "qzeros": torch.tensor([[highest]], dtype=torch.int32),
        "scales": torch.tensor([[0.5]], dtype=torch.float16),
    }
    count = len(column)
    form = StoredQuantization(layout, bits, count, symmetric=False)
    found = read_quantized(stored(tmp_path, tensors), form, "m", 1, count)
    zero = 0 if layout == "gptq" else highest
    assert found.dequantized().tolist() == [[(code - zero) / 2 for code in column]]


def test_awq_columns_by_hand(tmp_path: Path) -> None:
    """Eight rows of the output in one word: rows 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits."""
    tensors = {
        "qweight": torch.tensor([[0x75316420]] * 8, dtype=torch.int32),
        "qzeros": torch.tensor([[0]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    found = read_quantized(stored(tmp_path, tensors), StoredQuantization("awq", 4, 8), "m", 8, 8)
    assert found.dequantized()[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_compressed_codes_by_hand(tmp_path: Path) -> None:
    """pack_to_int32 adds 8: -8 is 0, 7 is 15."""
    tensors = {
        "weight_packed": torch.tensor([[0x7654_0F8F - (0 << 32)]], dtype=torch.int32),
        "weight_scale": torch.tensor([[2.0]]),
    }
    found = read_quantized(stored(tmp_path, tensors), StoredQuantization("packed", 4, 8), "m", 1, 8)
    assert found.dequantized().tolist() == [[14.0, 0.0, 14.0, -16.0, -8.0, -6.0, -4.0, -2.0]]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(40, 64), (1040, 96)])
def test_values_are_those_that_were_packed(
    tmp_path: Path, name: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(3)
    pack, _, form, bound = FORMATS[name]
    weight = torch.randn(shape)
    tensors, values = pack(weight)
    found = read_quantized(stored(tmp_path, tensors), form, "m", *shape)
    torch.testing.assert_close(found.dequantized(), values, rtol=1e-6, atol=1e-6)
    assert 0 < relative(found.dequantized(), weight) < bound


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_computes_with_the_values_of_its_codes(
    qwen3: Reference, tmp_path: Path, name: str
) -> None:
    quantized, plain = quantized_model(tmp_path, qwen3.folder, name)
    tokens = random_prompt(30)
    ours, theirs = ModelStory(quantized), ModelStory(plain)
    (found,) = ours.logits(Slice(tokens, 0, ours.blocks(30)))
    (wanted,) = theirs.logits(Slice(tokens, 0, theirs.blocks(30)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3-moe"])
def test_experts_and_latents_are_read_in_fp8_blocks(
    references: Callable[[str], Reference], tmp_path: Path, family: str
) -> None:
    quantized, plain = quantized_model(tmp_path, references(family).folder, "fp8-blocks")
    tokens = random_prompt(20)
    ours, theirs = ModelStory(quantized), ModelStory(plain)
    (found,) = ours.logits(Slice(tokens, 0, ours.blocks(20)))
    (wanted,) = theirs.logits(Slice(tokens, 0, theirs.blocks(20)))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_plain_or_differing_modules_are_multiplied_one_by_one(
    qwen3: Reference, tmp_path: Path
) -> None:
    quantized, plain = quantized_model(tmp_path, qwen3.folder, "gptq-act-order")
    tensors = load_file(quantized / "model.safetensors")
    base = "model.layers.1.self_attn."
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{base}k_proj.{part}"]
    tensors[f"{base}k_proj.weight"] = load_file(plain / "model.safetensors")[f"{base}k_proj.weight"]
    tensors[f"{base}q_proj.bias"] = torch.zeros(128)  # as GPTQ's writers leave them
    save_file(tensors, quantized / "model.safetensors")
    tokens = random_prompt(12)
    ours, theirs = ModelStory(quantized), ModelStory(plain)
    (found,) = ours.logits(Slice(tokens, 0, ours.blocks(12)))
    (wanted,) = theirs.logits(Slice(tokens, 0, theirs.blocks(12)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def spoiled(name, change):
    torch.manual_seed(1)
    tensors, _ = FORMATS[name][0](torch.randn(32, 64))
    change(tensors)
    return {key: value for key, value in tensors.items() if value is not None}


BAD = [
    ("awq", lambda t: t.update(qzeros=None), "qzeros is in none"),
    ("awq", lambda t: t.update(scales=t["scales"][:, :8].clone()), r"scales.*\[2, 8\].*\[2, 32\]"),
    ("awq", lambda t: t.update(qweight=t["qweight"][:32].clone()), r"qweight.*\[64, 4\]"),
    ("awq", lambda t: t.update(qweight=t["qweight"].long()), "has dtype I64; I32 is needed"),
    ("gptq", lambda t: t.update(qzeros=t["qzeros"].t().contiguous()), r"qzeros.*\[2, 4\]"),
    ("gptq", lambda t: t["scales"].fill_(float("nan")), "scales .*not finite"),
    ("gptq", lambda t: t["g_idx"].fill_(0), "g_idx .*does not name 2 groups of 32"),
    ("gptq", lambda t: t["g_idx"].add_(7), "g_idx .*does not name 2 groups of 32"),
    ("pack-int4", lambda t: t["weight_shape"].fill_(64), r"weight_shape.*says \[64, 64\]"),
    ("pack-int4", lambda t: t.update(weight_scale=torch.ones(32, 1)), r"weight_scale.*\[32, 2\]"),
    ("int8", lambda t: t.update(weight_scale=torch.ones(64, 1)), r"weight_scale.*\[32, 1\]"),
    ("int8", lambda t: t.update(weight_scale=torch.ones(32, 1).int()), "weight_scale .*I32"),
    ("fp8-blocks", lambda t: t.update(weight_scale_inv=torch.ones(2, 1)), r"scale_inv.*\[1, 1\]"),
    ("fp8-tensor", lambda t: t["weight_scale"].fill_(float("inf")), "not finite"),
    (
        "fp8-channel",
        lambda t: t["weight"].view(torch.uint8)[5].fill_(0x7F),
        r"m\.weight \[32, 64\] has NaN codes",
    ),
]


@pytest.mark.parametrize(("name", "change", "said"), BAD, ids=[f"{b[0]}-{b[2]}" for b in BAD])
def test_what_contradicts_the_form_is_named(
    tmp_path: Path, name: str, change: Callable[..., object], said: str
) -> None:
    shards = stored(tmp_path, spoiled(name, change))
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{said}|tensor m\.{said}"):
        read_quantized(shards, FORMATS[name][2], "m", 32, 64)


def test_columns_that_no_word_holds_are_refused(tmp_path: Path) -> None:
    shards = stored(tmp_path, {"qweight": torch.zeros(8, 4, dtype=torch.int32)})
    with pytest.raises(ModelError, match=r"\[32, 60\].* cannot be"):
        read_quantized(shards, StoredQuantization("gptq", 4, 20), "m", 32, 60)


def test_a_folder_with_a_wrong_scale_is_refused_at_load(qwen3: Reference, tmp_path: Path) -> None:
    quantized, _ = quantized_model(tmp_path, qwen3.folder, "awq")
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.scales"
    save_file(tensors | {name: torch.ones(1, 64)}, quantized / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj\.scales has shape \[1, 64\].*\[3, 64\]"):
        build_runner(quantized, EngineOptions(blocks=2))
