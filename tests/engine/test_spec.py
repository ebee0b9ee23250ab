from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.model.rope import Rotary
from baton.engine.spec.model_spec import AttentionSpec, ModelSpec, read_spec
from baton.engine.spec.rope_spec import RopeSpec
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject
from tests.support.small_models import Reference


def test_llama(spec_of: Callable[..., ModelSpec]) -> None:
    assert spec_of() == ModelSpec(
        family="llama",
        layers=2,
        hidden_size=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn_size=128,
        vocab_size=100,
        norm_eps=1e-5,
        max_context=256,
        rotary_dim=16,
        rope=RopeSpec("default", 5000.0),
        attention=AttentionSpec(scale=0.25, windows=(0, 0)),
        tied_embeddings=False,
        eos_ids=(2,),
    )


def test_group(spec_of: Callable[..., ModelSpec]) -> None:
    assert spec_of().group == 2


def test_kv_heads_default_to_heads_in_llama(spec_of: Callable[..., ModelSpec]) -> None:
    assert spec_of(num_key_value_heads="absent").kv_heads == 4


def test_qwen2_has_biases_on_query_key_value_only(spec_of: Callable[..., ModelSpec]) -> None:
    spec = spec_of(architectures=["Qwen2ForCausalLM"])
    assert (spec.qkv_bias, spec.output_bias, spec.qk_norm) == (True, False, False)


def test_qwen3_has_norms_and_its_own_head_dim(spec_of: Callable[..., ModelSpec]) -> None:
    spec = spec_of(architectures=["Qwen3ForCausalLM"])
    assert (spec.qkv_bias, spec.qk_norm, spec.head_dim) == (False, True, 128)


def test_attention_bias_puts_biases_on_all_four(spec_of: Callable[..., ModelSpec]) -> None:
    spec = spec_of(attention_bias=True)
    assert (spec.qkv_bias, spec.output_bias) == (True, True)


def test_end_tokens(spec_of: Callable[..., ModelSpec]) -> None:
    assert spec_of(eos_token_id=[2, 7]).eos_ids == (2, 7)
    assert spec_of(eos_token_id=None).eos_ids == ()
    assert spec_of(generation={"temperature": 0.6}).eos_ids == (2,)
    assert spec_of(generation={"eos_token_id": [5, 6]}).eos_ids == (5, 6)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("architectures", {"architectures": ["OlmoForCausalLM"]}),
        ("architectures", {"architectures": "absent"}),
        ("quantization_config.quant_method", {"quantization_config": {"quant_method": "quip"}}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("mlp_bias", {"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}),
        ("layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": "proportional"}}),
        ("rope_scaling.factor", {"rope_scaling": {"rope_type": "linear"}}),
        ("rope_scaling.factor", {"rope_scaling": {"rope_type": "linear", "factor": -1}}),
        ("rope_scaling.low_freq_factor", {"rope_scaling": {"rope_type": "llama3", "factor": 2}}),
        ("rope_scaling", {"rope_scaling": [1]}),
        ("rope_parameters.rope_type", {"rope_parameters": {"rope_type": ["x"]}}),
        ("hidden_size", {"hidden_size": "absent"}),
        ("hidden_size", {"hidden_size": "64"}),
        ("num_hidden_layers", {"num_hidden_layers": 0}),
        ("num_hidden_layers", {"num_hidden_layers": True}),
        ("num_key_value_heads", {"num_key_value_heads": 3}),
        ("head_dim", {"head_dim": 15}),
        ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
        ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
        ("eos_token_id", {"eos_token_id": [1, "x"]}),
    ],
)
def test_refused_by_name(
    spec_of: Callable[..., ModelSpec], field: str, changes: JsonObject
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {field}: "):
        spec_of(**changes)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff"])
def test_file_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json: "):
        read_spec(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: not found; give a folder"):
        read_spec(tmp_path)


JUNK = (None, -1, 0, 3, "x", [], {}, True, 1e308, float("nan"), 0.3, ["x"], {"a": 1}, 10**30)
ROPE = {
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
    "attention_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
    "partial_rotary_factor": 1.0,
}


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_any_value_of_any_field_is_read_or_refused(
    references: Callable[[str], Reference], tmp_path: Path, name: str
) -> None:
    """Whatever stands in a field, there is a spec or a ModelError that names the file."""
    good = json.loads((references(name).folder / "config.json").read_text())
    good |= {"partial_rotary_factor": 1.0, "rope_theta": 1e4, "sliding_window_pattern": 2}
    changed = [{**good, field: junk} for field in good for junk in JUNK]
    for kind in ("linear", "dynamic", "llama3", "yarn", "longrope") if name == "llama" else ():
        rope = {**ROPE, "rope_type": kind, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
        changed += [
            {**good, "rope_scaling": {**rope, field: junk}} for field in rope for junk in JUNK
        ]
    refused = 0
    for values in changed:
        (tmp_path / "config.json").write_text(json.dumps(values))
        try:
            spec = read_spec(tmp_path)
        except ModelError as error:
            assert str(tmp_path / "config.json") in str(error)
            refused += 1
        else:
            if spec.head_dim <= 64:
                assert Rotary(spec.rope, spec.rotary_dim).attention_factor > 0
    assert len(changed) // 4 < refused < len(changed)


def test_too_many_layers_are_refused_before_they_are_counted_out(
    spec_of: Callable[..., ModelSpec],
) -> None:
    with pytest.raises(
        ModelError, match=r"num_hidden_layers: 1000000000000 exceeds the maximum of"
    ):
        spec_of(num_hidden_layers=10**12)
