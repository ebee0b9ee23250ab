"""The specification of a model, read from the `config.json` of a Hugging Face folder.

One decoder class serves every family; a family is a row of facts in `families.py`, not a file
of code. A feature that this engine would compute wrongly is rejected by name. The module knows no
tensors and no torch; its values are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.engine.spec.config_fields import ConfigFields, read_fields
from baton.engine.spec.families import (
    Activation,
    Family,
    activation_of,
    family_of,
    refuse_unsupported,
)
from baton.engine.spec.moe_spec import ExpertsSpec, LatentSpec, read_experts, read_latent
from baton.engine.spec.quantization_config import StoredQuantization, read_quantization
from baton.engine.spec.rope_spec import RopeReader, RopeSpec, context_of
from baton.engine.spec.sliding_window import read_windows
from baton.runtime.end_tokens import end_tokens

_MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The weights of attention, the same in every backend:
    softmax(cap(scale * query·key)) over a layer's window, where cap(x) is
    `soft_cap` * tanh(x / `soft_cap`), or x itself without a cap."""

    scale: float
    windows: tuple[int, ...]  # per layer, in tokens, own one included; 0: all
    soft_cap: float = 0.0  # 0: none


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model. Fields with a default describe features that a model may lack.

    Sizes are counts; `max_context` counts the tokens of prompt and output together.
    """

    family: str  # the name of a row in families.py
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int  # of keys and values
    ffn_size: int
    vocab_size: int
    norm_eps: float
    max_context: int
    rotary_dim: int  # leading entries of a head that are rotated
    rope: RopeSpec
    attention: AttentionSpec
    tied_embeddings: bool
    eos_ids: tuple[int, ...]
    local_rope: RopeSpec | None = None  # of layers with a window; None: `rope`
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    norm_adds_one: bool = False  # stored norm weights lack 1
    output_norms: bool = False  # normalise outputs before the residual sum
    embedding_scale: float = 1.0
    logit_soft_cap: float = 0.0  # 0: none
    tensor_prefix: str = "model."  # of tensor names in the files
    quantization: StoredQuantization | None = None  # None: stored unquantised
    fused_tensors: bool = False  # qkv and gate-up stored fused
    further_layers: int = 0  # stored prediction layers, not read
    experts: ExpertsSpec | None = None  # None: all layers are dense
    latent: LatentSpec | None = None  # with it, `kv_heads` is 1
    features: int = 0  # of an EAGLE-3 head: numbers of a token beside its KV

    @property
    def group(self) -> int:
        """Return the number of query heads that share one KV head."""
        return self.heads // self.kv_heads


def read_spec(folder: Path, context: int = 0) -> ModelSpec:
    """Read `config.json` (and `generation_config.json`, for the end tokens) of `folder`.

    `context`: the maximum of served tokens (0: the model's own maximum), which decides the
    frequencies of longrope. Raises ModelError with file, field and remedy if a field is missing,
    malformed or not supported.
    """
    top = read_fields(folder / "config.json")
    return read_decoder(top, context, _eos_ids(folder, top))


def read_decoder(top: ConfigFields, context: int, eos_ids: tuple[int, ...]) -> ModelSpec:
    """Read a decoder from the fields of a `config.json`. Raises ModelError like `read_spec`."""
    family = family_of(top)
    fields = top.section(family.section) if family.section is not None else top
    fields = fields.with_defaults(family.defaults)
    for part in (top, fields):
        refuse_unsupported(part, family)
    layers = fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    latent = read_latent(fields, family.name)
    heads, kv_heads, head_dim = _heads(fields, latent)
    hidden_size = fields.integer("hidden_size")
    positions = fields.integer("max_position_embeddings")
    rotary_dim = _rotary_dim(fields, family, latent.rope_dim if latent else head_dim)
    ropes = RopeReader(fields, family.rope_kinds, positions, context, rotary_dim)
    rope, local_rope = ropes.two() if family.two_ropes else (ropes.one(), None)
    reached = context_of(rope, positions)
    attention_bias = fields.flag("attention_bias", False)
    return ModelSpec(
        family=family.name,
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_context=reached,
        rotary_dim=rotary_dim,
        rope=rope,
        attention=AttentionSpec(
            scale=latent.softmax_scale(rope) if latent else _scale(fields, head_dim),
            windows=read_windows(fields, family, layers, reached),
            soft_cap=fields.optional_number("attn_logit_softcapping") or 0.0,
        ),
        tied_embeddings=top.with_defaults(family.defaults).flag("tie_word_embeddings", False),
        eos_ids=eos_ids,
        local_rope=local_rope,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        activation=activation_of(fields, family),
        norm_adds_one=family.norm_adds_one,
        output_norms=family.output_norms,
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else 1.0,
        logit_soft_cap=fields.optional_number("final_logit_softcapping") or 0.0,
        tensor_prefix=family.tensor_prefix,
        fused_tensors=family.fused_tensors,
        quantization=read_quantization(top) or read_quantization(fields),
        further_layers=_further_layers(fields, family),
        experts=read_experts(fields, family.name, layers),
        latent=latent,
    )


def _further_layers(fields: ConfigFields, family: Family) -> int:
    if family.name != "deepseek_v3":
        return 0
    return fields.count("num_nextn_predict_layers", 0)


def _heads(fields: ConfigFields, latent: LatentSpec | None) -> tuple[int, int, int]:
    """Return the number of query heads, the number of KV heads, and the size of a KV head."""
    heads = fields.integer("num_attention_heads")
    if latent is not None:
        return heads, 1, latent.width
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", max(fields.integer("hidden_size") // heads, 1))
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if head_dim % 2 or head_dim < 4:
        raise fields.error("head_dim", f"{head_dim} is not an even number of 4 or more")
    return heads, kv_heads, head_dim


def _scale(fields: ConfigFields, head_dim: int) -> float:
    return float(fields.number("query_pre_attn_scalar", float(head_dim)) ** -0.5)


def _rotary_dim(fields: ConfigFields, family: Family, head_dim: int) -> int:
    """Read `partial_rotary_factor`, at the top level or in the section of the rotary embedding."""
    factor = fields.number("partial_rotary_factor", 1.0)
    for name in ("rope_parameters", "rope_scaling"):
        factor = fields.section(name).number("partial_rotary_factor", factor)
    dim = int(head_dim * factor)
    if not family.partial_rotary and dim != head_dim:
        raise fields.error("partial_rotary_factor", f"{factor} is not supported here; only 1.0 is")
    if not 2 <= dim <= head_dim or dim % 2:
        raise fields.error(
            "partial_rotary_factor",
            f"{factor} rotates {dim} of {head_dim} entries of a head; an even number is needed",
        )
    return dim


def _eos_ids(folder: Path, fields: ConfigFields) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    return end_tokens(folder, fields.values, read_fields(path).values if path.exists() else {})
