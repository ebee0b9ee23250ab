"""The storage format of a checkpoint's quantised matrices, read from `quantization_config`.

Supported are AWQ (AutoAWQ's "gemm" format), GPTQ (versions 1 and 2), compressed-tensors with
integer or FP8 weights, and FP8 with one scale per tensor, row or block (DeepSeek). Only weights
are quantised: activations keep the model's own dtype, even if the checkpoint allows less. Other
formats are rejected by name. The module knows no tensors; its values are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.engine.spec.config_fields import ConfigFields

Layout = Literal["awq", "gptq", "gptq_v2", "packed", "int8", "fp8"]
LoadQuantization = Literal["none", "int8", "int4"]  # `worker.quantization`
LOAD_QUANTIZATIONS: tuple[LoadQuantization, ...] = ("none", "int8", "int4")
_METHODS = ("awq", "gptq", "compressed-tensors", "fp8")
_FORMATS: dict[str, Layout] = {
    "pack-quantized": "packed",
    "int-quantized": "int8",
    "float-quantized": "fp8",
}
_GPTQ: dict[str, Layout] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """The properties that all quantised matrices of a checkpoint share."""

    layout: Layout
    bits: int
    group: int = 0  # columns that share a scale; 0: all
    block_rows: int = 1  # rows that share a scale (fp8); 0: all
    symmetric: bool = True  # no zero points are stored


def read_quantization(fields: ConfigFields) -> StoredQuantization | None:
    """Read `quantization_config` of a model's `config.json`; None if it has none. Raises
    ModelError with the name of a field that is not supported."""
    if fields.get("quantization_config") is None:
        return None
    config = fields.section("quantization_config")
    method = config.get("quant_method")
    if method == "awq":
        return _awq(config)
    if method == "gptq":
        return _gptq(config)
    if method == "compressed-tensors":
        return _compressed(config)
    if method == "fp8":
        return _fp8(config)
    raise _unknown(config, "quant_method", _METHODS)


def _awq(config: ConfigFields) -> StoredQuantization:
    bits = _one_of(config, "bits", (4,))
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise _unknown(config, "version", ("gemm",))
    if not config.flag("zero_point", True):
        raise config.error("zero_point", "only true is supported")
    return StoredQuantization("awq", bits, _group(config), symmetric=False)


def _gptq(config: ConfigFields) -> StoredQuantization:
    name = config.get("checkpoint_format", "gptq")
    if name not in _GPTQ:
        raise _unknown(config, "checkpoint_format", tuple(_GPTQ))
    bits = _one_of(config, "bits", (4, 8))
    return StoredQuantization(_GPTQ[str(name)], bits, _group(config), symmetric=False)


def _fp8(config: ConfigFields) -> StoredQuantization:
    if config.get("fmt", "e4m3") != "e4m3":
        raise _unknown(config, "fmt", ("e4m3",))
    block = config.get("weight_block_size")
    if block is None:
        return StoredQuantization("fp8", 8, block_rows=0)
    rows, columns = _block(config, "weight_block_size", block)
    return StoredQuantization("fp8", 8, columns, rows)


def _compressed(config: ConfigFields) -> StoredQuantization:
    name = config.get("format")
    if name not in _FORMATS:
        raise _unknown(config, "format", tuple(_FORMATS))
    layout = _FORMATS[str(name)]
    groups = config.section("config_groups")
    if len(groups.values) != 1:
        raise config.error(
            "config_groups", f"has {len(groups.values)} groups; only one is supported"
        )
    weights = groups.section(next(iter(groups.values))).section("weights")
    if config.section("transform_config").values:
        raise config.error("transform_config", "rotated weights are not supported")
    if weights.get("type", "int") != ("float" if layout == "fp8" else "int"):
        raise weights.error("type", f"{weights.get('type')!r} contradicts the format {name!r}")
    if weights.flag("dynamic", False):
        raise weights.error("dynamic", "weights must have stored scales; only false is supported")
    bits = _one_of(weights, "num_bits", (4, 8) if layout == "packed" else (8,))
    symmetric = weights.flag("symmetric", True)
    strategy = weights.get("strategy", "tensor" if weights.get("group_size") is None else "group")
    if strategy == "group":
        return StoredQuantization(layout, bits, _group(weights), symmetric=symmetric)
    if strategy == "channel":
        return StoredQuantization(layout, bits, symmetric=symmetric)
    if strategy == "tensor":
        return StoredQuantization(layout, bits, block_rows=0, symmetric=symmetric)
    if strategy == "block" and layout == "fp8":
        rows, columns = _block(weights, "block_structure", weights.get("block_structure"))
        return StoredQuantization(layout, bits, columns, rows)
    raise _unknown(weights, "strategy", ("group", "channel", "tensor"))


def _group(config: ConfigFields) -> int:
    """Read `group_size`, where -1 means a whole row."""
    if config.get("group_size") == -1:
        return 0
    return config.integer("group_size")


def _block(config: ConfigFields, field: str, value: object) -> tuple[int, int]:
    good = isinstance(value, list) and len(value) == 2
    if not good or not all(type(size) is int and size > 0 for size in _items(value)):
        raise config.error(field, f"{value!r} is not a pair of positive integers")
    rows, columns = _items(value)
    return int(str(rows)), int(str(columns))


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _one_of(config: ConfigFields, field: str, known: tuple[int, ...]) -> int:
    value = config.integer(field)
    if value not in known:
        raise _unknown(config, field, tuple(str(number) for number in known))
    return value


def _unknown(config: ConfigFields, field: str, known: tuple[str, ...]) -> Exception:
    return config.error(
        field, f"{config.get(field)!r} is not supported; only {', '.join(known)} can be loaded"
    )
