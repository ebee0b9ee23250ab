"""The table of model families, with the facts that each family fixes outside `config.json`.

A family is one row. The module also lists the fields that this engine would compute wrongly and
rejects them by name, for every family. It knows no tensors and keeps no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from baton.engine.spec.config_fields import ConfigFields
from baton.engine.spec.rope_spec import ROPE_KINDS, RopeKind

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Family:
    """The facts that a family fixes in its code. `defaults` are those of its configuration class,
    for fields that a file may omit."""

    name: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    qkv_bias: bool | None = None  # None: `attention_bias` decides, for the output too
    mlp_bias: bool = False  # `mlp_bias` is read
    qk_norm: bool = False
    norm_adds_one: bool = False
    output_norms: bool = False
    scaled_embedding: bool = False
    soft_caps: tuple[str, ...] = ()  # names of the fields
    activation: str = "hidden_act"  # name of the field
    default_activation: str = "silu"
    windows: Literal["none", "all", "switched", "alternating"] = "none"
    two_ropes: bool = False
    partial_rotary: bool = False
    rope_kinds: tuple[RopeKind, ...] = ROPE_KINDS
    fused_tensors: bool = False
    section: str | None = None  # that describes the decoder; None: the whole file
    tensor_prefix: str = "model."


_GEMMA = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2 = Family(
    "gemma2",
    {
        **_GEMMA,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
        "sliding_window_pattern": 2,
        "vocab_size": 256_000,
    },
    norm_adds_one=True,
    output_norms=True,
    scaled_embedding=True,
    soft_caps=("attn_logit_softcapping", "final_logit_softcapping"),
    activation="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    windows="alternating",
)
_GEMMA3 = replace(
    _GEMMA2,
    name="gemma3",
    defaults={
        **_GEMMA,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "vocab_size": 262_208,
    },
    qk_norm=True,
    soft_caps=("final_logit_softcapping",),
    two_ropes=True,
    rope_kinds=("default", "linear"),
)
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
FAMILIES = {
    "LlamaForCausalLM": Family("llama", mlp_bias=True),
    "MistralForCausalLM": Family(
        "mistral",
        {"sliding_window": 4096, "num_key_value_heads": 8},
        qkv_bias=False,
        windows="all",
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        {"sliding_window": 4096, "num_key_value_heads": 32},
        qkv_bias=True,
        windows="switched",
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {"sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128},
        qk_norm=True,
        windows="switched",
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        qkv_bias=False,
        windows="all",
        partial_rotary=True,
        rope_kinds=("default", "longrope"),
        fused_tensors=True,
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3, section="text_config", tensor_prefix="language_model.model."
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        {
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        qkv_bias=False,
        windows="all",
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        {
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
        },
        qk_norm=True,
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        {
            **_LATENT,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
        },
        qkv_bias=False,
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        {
            **_LATENT,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
        qkv_bias=False,
    ),
}
# Fields of related models that change the computation, and the values that leave it unchanged.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "clip_qkv": (),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1,),
    "is_encoder_decoder": (False,),
    "lm_head_bias": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": (),
    "qk_layernorm": (False,),
    "residual_multiplier": (1,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}


def family_of(fields: ConfigFields) -> Family:
    """Return the family that `architectures` names. Raises ModelError if the table lacks it."""
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise fields.error("architectures", f"{names!r} is not supported; use one of {known}")
    return FAMILIES[names[0]]


def activation_of(fields: ConfigFields, family: Family) -> Activation:
    """Return the activation of the MLP's gate. Raises ModelError."""
    name = fields.get(family.activation, family.default_activation)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise fields.error(family.activation, f"{name!r} is not supported; only {known} are")
    return _ACTIVATIONS[name]


def refuse_unsupported(fields: ConfigFields, family: Family) -> None:
    """Raise ModelError for a feature that this engine or this family does not compute."""
    neutral = dict(_NEUTRAL)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name not in family.soft_caps:
            neutral[name] = ()
    if not family.soft_caps:
        neutral["query_pre_attn_scalar"] = ()
    if not family.mlp_bias:
        neutral["mlp_bias"] = (False,)
    if family.qkv_bias is False:
        neutral["attention_bias"] = (False,)
    for name, values in neutral.items():
        value = fields.get(name)
        if value is not None and value not in values:
            allowed = " or ".join(str(value).lower() for value in (*values, "null"))
            raise fields.error(
                name, f"{value!r} is not supported for {family.name}; it must be {allowed}"
            )
