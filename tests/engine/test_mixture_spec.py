"""What `config.json` says of mixtures and latent attention, with the released models' values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.engine.spec.moe_spec import ExpertsSpec, LatentSpec
from baton.engine.spec.rope_spec import RopeSpec
from baton.runtime.errors import ModelError
from tests.support.json_values import JsonObject

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
QWEN3 = {**BASE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "head_dim": 16}
MIXTRAL = {**BASE, "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}
# As released, but for the sizes of `BASE`.
V2_LITE = {
    **BASE,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
}
V2 = {
    **V2_LITE,
    "n_group": 8,
    "n_routed_experts": 160,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3 = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelSpec]:
    def read(values, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
        return read_spec(tmp_path)

    return read


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


def test_mixtral(read: Callable[..., ModelSpec]) -> None:
    spec = read(MIXTRAL)
    assert spec.experts == ExpertsSpec((True,) * 4, 8, 2, 96, normalise=True)
    assert (spec.rope.theta, spec.norm_eps) == (1e6, 1e-5)
    assert spec.latent is None


def test_qwen3_moe(read: Callable[..., ModelSpec]) -> None:
    spec = read(QWEN3, norm_topk_prob=True, num_experts_per_tok=4, moe_intermediate_size=32)
    assert spec.experts == ExpertsSpec((True,) * 4, 128, 4, 32, normalise=True)
    assert spec.qk_norm
    assert not read(QWEN3).experts.normalise


def test_transformers_5_writes_the_count_by_another_name(read: Callable[..., ModelSpec]) -> None:
    assert read(without(QWEN3, "num_experts"), num_local_experts=9).experts.count == 9


@pytest.mark.parametrize(
    ("step", "dense", "sparse"),
    [
        (1, [], (True, True, True, True)),
        (2, [], (False, True, False, True)),
        (1, [0, 2], (False, True, False, True)),
        (2, [1], (False, False, False, True)),
        (3, None, (False, False, True, False)),
    ],
)
def test_which_layers_are_mixtures(
    read: Callable[..., ModelSpec], step: int, dense: list[int] | None, sparse: tuple[bool, ...]
) -> None:
    spec = read(QWEN3, decoder_sparse_step=step, mlp_only_layers=dense)
    assert spec.experts.sparse == sparse


def test_deepseek_v2_lite(read: Callable[..., ModelSpec]) -> None:
    spec = read(V2_LITE)
    sparse = (False, True, True, True)
    assert spec.experts == ExpertsSpec(sparse, 64, 6, 1408, shared_ffn_size=2816)
    assert spec.latent == LatentSpec(512, 64, 128, 128, query_rank=None, interleaved=True)
    assert (spec.kv_heads, spec.head_dim, spec.rotary_dim, spec.group) == (1, 576, 64, 4)
    assert spec.max_context == 163840
    assert spec.attention.scale == pytest.approx(192**-0.5 * 1.2608**2, rel=1e-4)


def test_deepseek_v2(read: Callable[..., ModelSpec]) -> None:
    spec = read(V2)
    assert spec.experts == ExpertsSpec(
        (False, True, True, True),
        160,
        6,
        1408,
        shared_ffn_size=2816,
        scale=16.0,
        groups=8,
        chosen_groups=3,
    )
    assert spec.latent.query_rank == 1536


def test_deepseek_v3(read: Callable[..., ModelSpec]) -> None:
    spec = read(V3)
    assert spec.experts == ExpertsSpec(
        (False, False, False, True),
        256,
        8,
        2048,
        shared_ffn_size=2048,
        scoring="sigmoid",
        normalise=True,
        scale=2.5,
        correction=True,
        groups=8,
        chosen_groups=4,
        group_best=2,
    )
    assert spec.latent.interleaved
    assert not read(V3, rope_interleave=False).latent.interleaved


def test_only_an_absent_norm_topk_prob_is_true(read: Callable[..., ModelSpec]) -> None:
    """transformers takes null for false."""
    assert read(without(V3, "norm_topk_prob")).experts.normalise
    assert not read(V3, norm_topk_prob=None).experts.normalise


def test_one_group_is_no_limit(read: Callable[..., ModelSpec]) -> None:
    spec = read(V3, n_group=1, topk_group=1)
    assert (spec.experts.groups, spec.experts.chosen_groups) == (1, 1)


def test_without_shared_experts(read: Callable[..., ModelSpec]) -> None:
    assert read(V2_LITE, n_shared_experts=0).experts.shared_ffn_size == 0


def test_scale_without_mscale_is_the_root(read: Callable[..., ModelSpec]) -> None:
    assert read(without(V3, "rope_scaling")).attention.scale == pytest.approx(192**-0.5)
    latent = LatentSpec(8, 4, 12, 8, None, interleaved=True)
    assert latent.softmax_scale(RopeSpec("yarn", 1e4, 40.0)) == 0.25


@pytest.mark.parametrize(
    ("values", "changes", "field"),
    [
        (V3, {"scoring_func": "softmax"}, "scoring_func"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method"),
        (V3, {"topk_method": "greedy"}, "topk_method"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2, {"n_group": 7}, "n_group: 7 does not divide 160 experts"),
        (V2, {"n_group": None}, "n_group"),
        (V2, {"topk_group": 9}, "topk_group: 9 of 8 groups"),
        (V3, {"n_routed_experts": 8, "num_experts_per_tok": 2}, "1 experts, fewer than 2"),
        (V3, {"topk_group": 1, "num_experts_per_tok": 33}, "topk_group"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V3, {"attention_bias": True}, "attention_bias"),
        (V2, {"mlp_bias": True}, "mlp_bias"),
        (V3, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        (V3, {"q_lora_rank": 0}, "q_lora_rank"),
        (V3, {"quantization_config": {"quant_method": "other"}}, "quantization_config"),
        (V2, {"num_experts_per_tok": None}, "num_experts_per_tok"),
        (QWEN3, {"num_experts_per_tok": 129}, "129 is more than the 128 experts"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 9}, "use_sliding_window"),
        (QWEN3, {"mlp_only_layers": 3}, "mlp_only_layers"),
        (QWEN3, {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        (QWEN3, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (MIXTRAL, {"hidden_act": "relu"}, "hidden_act"),
        (MIXTRAL, {"num_local_experts": True}, "num_local_experts"),
    ],
)
def test_refused_by_name(
    read: Callable[..., ModelSpec], values: JsonObject, changes: JsonObject, field: str
) -> None:
    with pytest.raises(ModelError, match=field):
        read(values, **changes)
