"""The specification of rotary position embedding, read from `config.json`.

It is stated as `rope_theta` with `rope_scaling`, as the `rope_parameters` of transformers 5, or as
the two tables of Gemma 3. The module knows no tensors; `rope.py` computes what the fields mean.
Values are immutable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from baton.engine.spec.config_fields import ConfigFields

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OTHER_NAMES = {"su": "longrope"}
_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
}
# Files of yarn models have these fields, but transformers does not read them either.
_UNREAD = {"yarn": {"attn_factor", "finetuned"}}
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Fields that `kind` does not use keep their defaults."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_context: int = 0  # tokens; llama3, yarn, dynamic, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: from factor (and mscale)
    mscale: float = 0.0  # yarn; 0: absent
    mscale_all_dim: float = 0.0  # yarn; 0: absent
    truncate: bool = True  # yarn
    stretch: tuple[float, ...] = ()  # longrope: factor per pair of entries


@dataclass(frozen=True, slots=True)
class RopeReader:
    """The reader of the rotary sections of one `config.json`. Its methods raise ModelError."""

    fields: ConfigFields
    kinds: tuple[RopeKind, ...]  # supported by the family
    positions: int  # `max_position_embeddings`
    context: int  # served tokens; 0: the model's maximum
    dim: int  # rotated entries of a head

    def one(self) -> RopeSpec:
        """Read one table for all layers."""
        fields = self.fields
        name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
        section = fields.section(name)
        for kind in _LAYER_KINDS:
            if kind in section.values:
                raise section.error(kind, "this model has one rotary embedding for all layers")
        theta = section.number("rope_theta", fields.number("rope_theta", 10_000.0))
        return self._read(section, theta)

    def two(self) -> tuple[RopeSpec, RopeSpec]:
        """Read two tables (Gemma 3): of the layers with full attention, and of those with a
        window. Scaling applies to the latter only if `rope_parameters` says so."""
        fields = self.fields
        both = fields.section("rope_parameters")
        for name in both.values:
            if name not in _LAYER_KINDS:
                raise both.error(name, f"is not one of {', '.join(_LAYER_KINDS)}")
        full, local = (both.section(name) for name in _LAYER_KINDS)
        if fields.get("rope_scaling"):
            if full.values:
                raise fields.error("rope_scaling", "contradicts rope_parameters; give one of them")
            full = fields.section("rope_scaling")
        full_theta = full.number("rope_theta", fields.number("rope_theta", 1_000_000.0))
        local_theta = local.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0))
        return self._read(full, full_theta), self._read(local, local_theta)

    def _read(self, rope: ConfigFields, theta: float) -> RopeSpec:
        kind = self._kind(rope)
        for name in rope.values:
            known = name in _KEYS or name in _UNREAD.get(kind, ())
            if not known and rope.get(name) is not None:
                raise rope.error(name, "is unknown and may change the computation; remove it")
        if theta <= 1:
            raise rope.error("rope_theta", f"{theta} is not above 1")
        if kind == "default":
            return RopeSpec("default", theta)
        if kind == "linear":
            return RopeSpec("linear", theta, rope.number("factor"))
        if kind == "dynamic":
            return RopeSpec(
                "dynamic", theta, rope.number("factor"), original_context=self.positions
            )
        original = rope.integer("original_max_position_embeddings", self.positions)
        original = self.fields.integer("original_max_position_embeddings", original)
        if kind == "llama3":
            return self._llama3(rope, theta, original)
        factor = rope.number("factor", self.positions / original)
        if kind == "longrope":
            return self._longrope(rope, theta, factor, original)
        return RopeSpec(
            "yarn",
            theta,
            factor,
            original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.optional_number("attention_factor"),
            mscale=rope.optional_number("mscale") or 0.0,
            mscale_all_dim=rope.optional_number("mscale_all_dim") or 0.0,
            truncate=rope.flag("truncate", True),
        )

    def _llama3(self, rope: ConfigFields, theta: float, original: int) -> RopeSpec:
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"{high} is not above low_freq_factor {low}")
        factor = rope.number("factor")
        return RopeSpec(
            "llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high
        )

    def _longrope(self, rope: ConfigFields, theta: float, factor: float, original: int) -> RopeSpec:
        """Read longrope. The file has two sets of frequencies, for sequences up to `original`
        tokens and for longer ones; one set must rotate all tokens of a sequence. The served
        context decides which set is used (docs/decisions/0041-longrope.md)."""
        if original == 1:
            raise rope.error("original_max_position_embeddings", "is 1 token; give more")
        short = rope.numbers("short_factor", self.dim // 2)
        long = rope.numbers("long_factor", self.dim // 2)
        return RopeSpec(
            "longrope",
            theta,
            factor,
            original,
            attention_factor=rope.optional_number("attention_factor"),
            stretch=long if (self.context or self.positions) > original else short,
        )

    def _kind(self, rope: ConfigFields) -> RopeKind:
        name = rope.get("rope_type", rope.get("type", "default"))
        if isinstance(name, str):
            name = _OTHER_NAMES.get(name, name)
        for kind in self.kinds:
            if name == kind:
                return kind
        raise rope.error(
            "rope_type", f"{name!r} is not supported; use one of {', '.join(self.kinds)}"
        )


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor on cosines and sines for a context that grows `factor` times
    (arXiv:2309.00071, section 3.4; `mscale` is DeepSeek's addition)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def context_of(rope: RopeSpec, positions: int) -> int:
    """Return the context of a model. yarn and dynamic configurations keep the original training
    length in `max_position_embeddings` and reach `factor` times as far."""
    if rope.kind == "yarn":
        return max(positions, int(rope.original_context * rope.factor))
    if rope.kind == "dynamic":
        return int(positions * rope.factor)
    return positions
