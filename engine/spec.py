"""What a model is, read from a Hugging Face folder's `config.json`.

One decoder class serves every family; a family is a row of facts here, not a file of code.
Whatever this engine would compute wrongly is refused by name. Knows no tensors and no torch;
the values are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.engine.config_fields import ConfigFields, read_fields

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


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


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder-only model.

    Sizes are counts, `max_context` is in tokens of prompt and output together.
    """

    family: str  # llama, mistral, qwen2, qwen3
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    max_context: int
    rope: RopeSpec
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    eos_ids: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family fixes in its code or defaults, where config.json may be silent."""

    name: str
    qkv_bias: bool | None  # None: `attention_bias` decides
    qk_norm: bool
    head_dim: int | None = None  # None: hidden_size / heads
    sliding_window: int | None = None  # when the field is absent
    window_switch: bool = False  # `use_sliding_window` decides whether the window is in use


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", None, False),
    "MistralForCausalLM": _Family("mistral", False, False, sliding_window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", True, False, window_switch=True),
    "Qwen3ForCausalLM": _Family("qwen3", None, True, head_dim=128, window_switch=True),
}
_ACTIVATIONS = ("silu", "swish")


def read_spec(folder: Path) -> ModelSpec:
    """Read `config.json` (and `generation_config.json`, for the end tokens) of `folder`.

    Raises ModelError naming file, field and remedy for what is missing, malformed or not
    supported.
    """
    fields = read_fields(folder / "config.json")
    family = _family(fields)
    _refuse_unsupported(fields, family)
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads if family.name == "llama" else None)
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", family.head_dim or max(hidden_size // heads, 1))
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if head_dim % 2 or head_dim < 4:
        raise fields.error("head_dim", f"{head_dim} is not an even number of 4 or more")
    attention_bias = fields.flag("attention_bias", False)
    positions = fields.integer("max_position_embeddings")
    rope = _rope(fields, positions)
    return ModelSpec(
        family=family.name,
        layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_context=_max_context(rope, positions),
        rope=rope,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias and family.qkv_bias is None,
        qk_norm=family.qk_norm,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        eos_ids=_eos_ids(folder, fields),
    )


def _family(fields: ConfigFields) -> _Family:
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise fields.error("architectures", f"{names!r} is not supported; use one of {known}")
    return _FAMILIES[names[0]]


def _refuse_unsupported(fields: ConfigFields, family: _Family) -> None:
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "use the unquantized weights of this model")
    activation = fields.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise fields.error("hidden_act", f"{activation!r} is not supported; only 'silu' is")
    if fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias", "a bias in the MLP is not supported; it must be false")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "only 1.0 is supported")
    _refuse_window(fields, family)


def _refuse_window(fields: ConfigFields, family: _Family) -> None:
    """A window at least as long as the context is never in use, and so allowed."""
    kinds = fields.get("layer_types")
    if kinds is not None and any(kind != "full_attention" for kind in _list(kinds)):
        raise fields.error("layer_types", "only 'full_attention' layers are supported")
    if family.window_switch and not fields.flag("use_sliding_window", False):
        return
    if family.name == "llama":
        return
    window = fields.optional_integer("sliding_window", family.sliding_window)
    if window is not None and window < fields.integer("max_position_embeddings"):
        raise fields.error(
            "sliding_window",
            f"a window of {window} tokens is in use, which is not supported; "
            "use a version of the model with full attention (null)",
        )


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _rope(fields: ConfigFields, positions: int) -> RopeSpec:
    """Both forms: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.section(name)
    kind = _rope_kind(rope)
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "only 1.0 is supported")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
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


def _rope_kind(rope: ConfigFields) -> RopeKind:
    name = rope.get("rope_type", rope.get("type", "default"))
    for kind in ROPE_KINDS:
        if name == kind:
            return kind
    raise rope.error("rope_type", f"{name!r} is not supported; use one of {', '.join(ROPE_KINDS)}")


def _max_context(rope: RopeSpec, positions: int) -> int:
    """`max_position_embeddings`, which yarn and dynamic configurations leave at the length of
    the original training: those reach `factor` times as far."""
    if rope.kind == "yarn":
        return max(positions, int(rope.original_context * rope.factor))
    if rope.kind == "dynamic":
        return int(positions * rope.factor)
    return positions


def _eos_ids(folder: Path, fields: ConfigFields) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    source = read_fields(path) if path.exists() else fields
    if source.get("eos_token_id") is None:
        source = fields
    found = source.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise source.error("eos_token_id", f"{token!r} is not a token id")
    return tuple(ids)
