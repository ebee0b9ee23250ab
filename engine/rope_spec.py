"""Rotary position embedding as `config.json` states it, in each of the forms in use.

`rope_theta` beside `rope_scaling`, transformers 5's `rope_parameters`, and Gemma 3's two
tables. Knows no tensors; what the fields mean is computed in `rope.py`. Immutable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from baton.engine.config_fields import ConfigFields

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Fields that a kind does not use keep their defaults."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_context: int = 0  # tokens; llama3, yarn, dynamic
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: from factor and mscale
    mscale: float = 0.0  # yarn; 0: absent
    mscale_all_dim: float = 0.0  # yarn; 0: absent
    truncate: bool = True  # yarn


def read_rope(fields: ConfigFields, positions: int, kinds: tuple[RopeKind, ...]) -> RopeSpec:
    """One table for all layers. `positions`: `max_position_embeddings`. Raises ModelError."""
    section = fields.section("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    for name in _LAYER_KINDS:
        if name in section.values:
            raise section.error(name, "this model has one rotary embedding for all its layers")
    theta = section.number("rope_theta", fields.number("rope_theta", 10_000.0))
    return _read(fields, section, theta, positions, kinds)


def read_two_ropes(
    fields: ConfigFields, positions: int, kinds: tuple[RopeKind, ...]
) -> tuple[RopeSpec, RopeSpec]:
    """Gemma 3: of the layers with full attention, and of those with a window, which scaling
    does not touch unless `rope_parameters` says so. Raises ModelError."""
    both = fields.section("rope_parameters")
    for name in both.values:
        if name not in _LAYER_KINDS:
            raise both.error(name, f"is not one of {', '.join(_LAYER_KINDS)}")
    full, local = (both.section(name) for name in _LAYER_KINDS)
    if fields.get("rope_scaling"):
        if full.values:
            raise fields.error("rope_scaling", "contradicts rope_parameters; give one of the two")
        full = fields.section("rope_scaling")
    full_theta = full.number("rope_theta", fields.number("rope_theta", 1_000_000.0))
    local_theta = local.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0))
    return (
        _read(fields, full, full_theta, positions, kinds),
        _read(fields, local, local_theta, positions, kinds),
    )


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN scales what it stretches `factor` times (arXiv:2309.00071, section 3.4;
    `mscale` is DeepSeek's addition)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def context_of(rope: RopeSpec, positions: int) -> int:
    """`max_position_embeddings`, which yarn and dynamic configurations leave at the length of
    the original training: those reach `factor` times as far."""
    if rope.kind == "yarn":
        return max(positions, int(rope.original_context * rope.factor))
    if rope.kind == "dynamic":
        return int(positions * rope.factor)
    return positions


def _read(
    fields: ConfigFields,
    rope: ConfigFields,
    theta: float,
    positions: int,
    kinds: tuple[RopeKind, ...],
) -> RopeSpec:
    kind = _kind(rope, kinds)
    if kind == "default":
        return RopeSpec("default", theta)
    if kind == "linear":
        return RopeSpec("linear", theta, rope.number("factor"))
    if kind == "dynamic":
        return RopeSpec("dynamic", theta, rope.number("factor"), original_context=positions)
    original = rope.integer("original_max_position_embeddings", positions)
    original = fields.integer("original_max_position_embeddings", original)
    if kind == "llama3":
        return RopeSpec(
            "llama3",
            theta,
            rope.number("factor"),
            original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return RopeSpec(
        "yarn",
        theta,
        rope.number("factor", positions / original),
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale") or 0.0,
        mscale_all_dim=rope.optional_number("mscale_all_dim") or 0.0,
        truncate=rope.flag("truncate", True),
    )


def _kind(rope: ConfigFields, kinds: tuple[RopeKind, ...]) -> RopeKind:
    name = rope.get("rope_type", rope.get("type", "default"))
    for kind in kinds:
        if name == kind:
            return kind
    raise rope.error("rope_type", f"{name!r} is not supported; use one of {', '.join(kinds)}")
