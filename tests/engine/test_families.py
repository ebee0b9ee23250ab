from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject
from tests.support.small_models import Reference

GEMMA2, GEMMA3 = ({"architectures": [f"Gemma{n}ForCausalLM"]} for n in (2, 3))


def test_gemma2_is_what_its_class_says_where_the_file_is_silent(
    spec_of: Callable[..., ModelSpec],
) -> None:
    spec = spec_of(**GEMMA2)
    assert (spec.attention.scale, spec.attention.soft_cap) == (1 / 16, 50.0)
    assert (spec.logit_soft_cap, spec.embedding_scale, spec.head_dim) == (30.0, 8.0, 256)
    assert (spec.norm_adds_one, spec.output_norms, spec.qk_norm) == (True, True, False)
    assert (spec.activation, spec.tied_embeddings) == ("gelu_tanh", True)


def test_gemma2_without_caps(spec_of: Callable[..., ModelSpec]) -> None:
    spec = spec_of(**GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (spec.attention.soft_cap, spec.logit_soft_cap) == (0.0, 0.0)


def test_gemma3_has_norms_of_query_and_key_and_no_caps(spec_of: Callable[..., ModelSpec]) -> None:
    spec = spec_of(**GEMMA3, query_pre_attn_scalar=64)
    assert (spec.attention.scale, spec.attention.soft_cap) == (1 / 8, 0.0)
    assert (spec.qk_norm, spec.logit_soft_cap) == (True, 0.0)


def test_text_part_of_gemma3_for_images(spec_of: Callable[..., ModelSpec]) -> None:
    """As sparse as the files of the first release are."""
    spec = spec_of(
        architectures=["Gemma3ForConditionalGeneration"],
        text_config={
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        eos_token_id=[1, 106],
    )
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.layers) == (8, 4, 256, 34)
    assert (spec.vocab_size, spec.max_context, spec.eos_ids) == (262_208, 131_072, (1, 106))
    assert spec.attention.windows[4:7] == (1024, 0, 1024)
    assert (spec.rope.kind, spec.rope.theta, spec.tied_embeddings) == ("linear", 1e6, True)
    assert spec.tensor_prefix == "language_model.model."


def test_phi3_has_fused_tensors(spec_of: Callable[..., ModelSpec]) -> None:
    spec = spec_of(architectures=["Phi3ForCausalLM"], rms_norm_eps="absent")
    assert (spec.fused_tensors, spec.qkv_bias, spec.norm_eps) == (True, False, 1e-5)


def test_biases_of_the_mlp_in_llama(spec_of: Callable[..., ModelSpec]) -> None:
    assert spec_of(mlp_bias=True).mlp_bias


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3"])
def test_plain_families_have_none_of_gemmas_features(
    spec_of: Callable[..., ModelSpec], family: str
) -> None:
    spec = spec_of(architectures=[f"{family}ForCausalLM"])
    assert spec.attention.scale == spec.head_dim**-0.5
    assert (spec.attention.soft_cap, spec.logit_soft_cap, spec.embedding_scale) == (0, 0, 1)
    assert not (spec.norm_adds_one or spec.output_norms or spec.mlp_bias or spec.local_rope)
    assert (spec.activation, spec.tensor_prefix) == ("silu", "model.")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("query_pre_attn_scalar", 64),
        ("clip_qkv", 8.0),
        ("logit_scale", 0.0625),
        ("logits_scaling", 8.0),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("attention_multiplier", 0.01),
        ("attention_chunk_size", 8192),
        ("no_rope_layers", [1, 1]),
        ("qk_layernorm", True),
        ("use_qk_norm", True),
        ("use_bidirectional_attention", True),
        ("use_parallel_residual", True),
        ("lm_head_bias", True),
        ("use_mrope", True),
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("is_encoder_decoder", True),
        ("hidden_act", "gelu"),
        ("hidden_act", ["silu"]),
    ],
)
def test_field_that_changes_the_computation_is_refused_by_name(
    spec_of: Callable[..., ModelSpec], name: str, value: object
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {name}: .*{value!r}".replace("[", "\\[")):
        spec_of(**{name: value})


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("Mistral", "attention_bias", True),
        ("Phi3", "attention_bias", True),
        ("Mistral", "mlp_bias", True),
        ("Phi3", "mlp_bias", True),
        ("Gemma3", "attn_logit_softcapping", 50.0),
        ("Gemma2", "hidden_activation", "gelu"),
        ("Gemma2", "use_bidirectional_attention", True),
        ("Gemma3", "use_bidirectional_attention", True),
        ("Gemma3", "final_logit_softcapping", -1.0),
        ("Gemma3", "query_pre_attn_scalar", 0),
    ],
)
def test_field_that_one_family_does_not_have(
    spec_of: Callable[..., ModelSpec], family: str, name: str, value: object
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {name}: "):
        spec_of(**{"architectures": [f"{family}ForCausalLM"], name: value})


@pytest.mark.parametrize(
    "neutral",
    [
        {"logit_scale": 1.0, "clip_qkv": None, "use_qk_norm": False, "residual_multiplier": 1},
        {"attention_dropout": 0.1, "initializer_range": 0.5, "pretraining_tp": 2, "use_cache": 0},
    ],
)
def test_fields_that_do_not_matter_are_read_over(
    spec_of: Callable[..., ModelSpec], neutral: JsonObject
) -> None:
    assert spec_of(**neutral) == spec_of()


def test_a_quantised_text_part_is_refused_too(spec_of: Callable[..., ModelSpec]) -> None:
    text = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 8}
    for section in ("text", "top"):
        changes = {"text_config": dict(text), "architectures": ["Gemma3ForConditionalGeneration"]}
        (changes["text_config"] if section == "text" else changes)["quantization_config"] = {"a": 1}
        with pytest.raises(ModelError, match="quantization_config"):
            spec_of(**changes)


PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "full_attn_mod": 1,
    "hidden_size": 3072,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131_072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [3.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "sliding_window": 262_144,
    "tie_word_embeddings": True,
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "max_position_embeddings": 32_768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 224,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
}


def test_files_in_the_form_of_released_models(spec_of: Callable[..., ModelSpec]) -> None:
    phi = spec_of(**PHI4_MINI)
    assert (phi.head_dim, phi.rotary_dim, phi.rope.kind) == (128, 96, "longrope")
    assert (phi.rope.stretch[0], phi.rope.factor, phi.max_context) == (3.0, 32.0, 131_072)
    assert set(phi.attention.windows) == {0}  # longer than the context
    assert spec_of(context=4096, **PHI4_MINI).rope.stretch[0] == 1.0
    gemma = spec_of(**GEMMA3_1B)
    assert gemma.attention.windows == (*(512, 512, 512, 512, 512, 0) * 4, 512, 512)
    assert (gemma.rope.theta, gemma.local_rope.theta) == (1e6, 1e4)
    assert (gemma.attention.scale, gemma.group, gemma.embedding_scale) == (1 / 16, 4, 1152**0.5)
    gemma = spec_of(**GEMMA2_9B)
    assert gemma.attention.windows == (4096, 0) * 21
    assert (gemma.attention.scale, gemma.attention.soft_cap) == (224**-0.5, 50.0)


# What a released configuration may say that changes no number of an answer.
HARMLESS = {
    "_name_or_path",
    "_sliding_window_pattern",  # layer_types, beside it in the same file, is read
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "id2label",
    "initializer_range",
    "label2id",
    "model_type",  # architectures is read
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",  # of training, as the next
    "router_jitter_noise",
    "transformers_version",
    "use_cache",
}
_DERIVED = {"head_dim", "qk_head_dim"}  # transformers writes them; they follow from the qk_* sizes
HARMLESS_IN = {
    "qwen3-moe": {"sliding_window", "max_window_layers"},  # of use_sliding_window, which is refused
    "deepseek-v2-groups": _DERIVED,
    "deepseek-v3": _DERIVED,
}


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "mistral-window",
        "qwen2-window",
        "qwen3-window",
        "phi3-longrope",
        "gemma2",
        "gemma3",
        "mixtral",
        "qwen3-moe",
        "deepseek-v2-groups",
        "deepseek-v3",
    ],
)
def test_every_field_of_a_transformers_class_is_accounted_for(
    references: Callable[[str], Reference], spec_of: Callable[..., ModelSpec], name: str
) -> None:
    """A field counts as read if some value of it changes the spec or is refused."""
    config = references(name).model.config
    values = {**config.to_dict(), "architectures": [type(references(name).model).__name__]}
    if name.startswith("qwen"):  # two ways to say which layers have a window
        values |= {"max_window_layers": 1, "layer_types": None}
    right = spec_of(**values)
    ignored = set()
    for field in values:
        for junk in ("x", True, 0.3, [3], 5):
            try:
                if spec_of(**{**values, field: junk}) != right:
                    break
            except ModelError:
                break
        else:
            ignored.add(field)
    assert ignored <= HARMLESS | HARMLESS_IN.get(name, set())
