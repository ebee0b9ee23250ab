from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.spec.config_fields import ConfigFields
from baton.engine.spec.quantization_config import StoredQuantization, read_quantization
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject


def read(tmp_path, config):
    return read_quantization(
        ConfigFields(tmp_path / "config.json", {"quantization_config": config})
    )


def compressed(form="pack-quantized", groups=None, **weights):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, **weights}
    groups = groups if groups is not None else {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def test_no_field_is_no_form(tmp_path: Path) -> None:
    assert read_quantization(ConfigFields(tmp_path, {})) is None
    assert read(tmp_path, None) is None


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (AWQ, StoredQuantization("awq", 4, 128, symmetric=False)),
        (GPTQ, StoredQuantization("gptq", 4, 128, symmetric=False)),
        (GPTQ | {"group_size": -1, "bits": 8}, StoredQuantization("gptq", 8, 0, symmetric=False)),
        (
            GPTQ | {"checkpoint_format": "gptq_v2"},
            StoredQuantization("gptq_v2", 4, 128, symmetric=False),
        ),
        (compressed(), StoredQuantization("packed", 4, 64)),
        (compressed(symmetric=False), StoredQuantization("packed", 4, 64, symmetric=False)),
        (
            compressed("int-quantized", num_bits=8, strategy="channel", group_size=None),
            StoredQuantization("int8", 8),
        ),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
            StoredQuantization("fp8", 8, block_rows=0),
        ),
        (
            compressed(
                "float-quantized",
                num_bits=8,
                type="float",
                strategy="block",
                block_structure=[128, 64],
            ),
            StoredQuantization("fp8", 8, 64, 128),
        ),
        ({"quant_method": "fp8"}, StoredQuantization("fp8", 8, block_rows=0)),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 64]},
            StoredQuantization("fp8", 8, 64, 128),
        ),
    ],
)
def test_forms(tmp_path: Path, config: JsonObject, form: StoredQuantization) -> None:
    assert read(tmp_path, config) == form


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("awq", r"quantization_config: 'awq' is not an object"),
        ({}, r"quantization_config\.quant_method: None is not supported; only awq, gptq"),
        ({"quant_method": "bitsandbytes"}, "quant_method: 'bitsandbytes'"),
        (AWQ | {"bits": 3}, r"quantization_config\.bits: 3 is not supported; only 4"),
        (AWQ | {"version": "gemv"}, "version: 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (AWQ | {"group_size": 0}, "group_size: 0 is not a positive"),
        (GPTQ | {"bits": 2}, "bits: 2"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        (compressed("marlin-24"), "format: 'marlin-24'"),
        (compressed(groups={}), "config_groups: has 0 groups"),
        (compressed(groups={"a": {}, "b": {}}), "config_groups: has 2 groups"),
        (compressed() | {"transform_config": {"config_groups": {"r1": {}}}}, "transform_config"),
        (compressed(num_bits=3), r"group_0\.weights\.num_bits: 3"),
        (compressed(type="float"), "type: 'float' contradicts the format 'pack-quantized'"),
        (compressed(dynamic=True), "dynamic"),
        (compressed(strategy="token"), "strategy: 'token'"),
        (compressed("int-quantized"), "num_bits: 4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, "x"]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path: Path, config: object, said: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{said}"):
        read(tmp_path, config)
