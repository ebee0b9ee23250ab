"""The facts of mixtures of experts and of multi-head latent attention, read from `config.json`.

What a family fixes in its code, the choice of experts above all, stands here; what this
engine would compute wrongly is refused by name. Knows no tensors; the values are immutable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from baton.engine.spec.config_fields import ConfigFields
from baton.engine.spec.rope_spec import RopeSpec, yarn_magnitude


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Which layers are mixtures, and how a token's experts are chosen (`experts.route`)."""

    sparse: tuple[bool, ...]  # per layer; the others have a dense MLP
    count: int
    chosen: int  # per token
    ffn_size: int  # of one expert
    shared_ffn_size: int = 0  # of the experts that every token visits, as one; 0: none
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = False  # the chosen weights sum to 1 before they are scaled
    scale: float = 1.0
    correction: bool = False  # a learned bias takes part in the choice, not in the weights
    groups: int = 1
    chosen_groups: int = 1  # a token's experts come from that many groups alone
    group_best: int = 1  # a group's score is the sum of that many of its best


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: keys and values are low-rank products of one latent vector
    per token, beside one rotated key part that all heads share."""

    rank: int  # of the latent
    rope_dim: int  # of the shared rotated key part
    plain_dim: int  # of a head's key part without positions
    value_dim: int  # of a head
    query_rank: int | None  # None: queries are one product
    interleaved: bool  # rotated pairs are neighbours, not halves

    @property
    def width(self) -> int:
        """Numbers per token and layer in the pool."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Of one head's query."""
        return self.plain_dim + self.rope_dim

    def softmax_scale(self, rope: RopeSpec) -> float:
        """1 / sqrt(query_dim), times the square of YaRN's magnitude for `mscale_all_dim`."""
        scale = 1.0 / math.sqrt(self.query_dim)
        if rope.kind == "yarn" and rope.mscale_all_dim:
            scale *= yarn_magnitude(rope.factor, rope.mscale_all_dim) ** 2
        return scale


def read_experts(fields: ConfigFields, family: str, layers: int) -> ExpertsSpec | None:
    """None for a dense family. Raises ModelError naming file, field and remedy."""
    reader = _EXPERTS.get(family)
    if reader is None:
        return None
    spec = reader(fields, layers)
    if spec.chosen > spec.count:
        raise fields.error("num_experts_per_tok", f"{spec.chosen} of {spec.count} experts")
    if spec.count % spec.groups:
        raise fields.error("n_group", f"{spec.groups} does not divide {spec.count} experts")
    members = spec.count // spec.groups
    if not spec.chosen_groups <= spec.groups or spec.chosen_groups * members < spec.chosen:
        raise fields.error(
            "topk_group",
            f"{spec.chosen_groups} of {spec.groups} groups of {members} experts, to choose "
            f"{spec.chosen} from",
        )
    if members < spec.group_best:
        raise fields.error("n_group", f"a group of {members} experts has no {spec.group_best} best")
    return spec


def read_latent(fields: ConfigFields, family: str) -> LatentSpec | None:
    """None for a family with keys and values per head. Raises ModelError."""
    if family not in ("deepseek_v2", "deepseek_v3"):
        return None
    heads, kv_heads = fields.integer("num_attention_heads"), fields.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise fields.error("num_key_value_heads", f"{kv_heads!r} is not the {heads} heads")
    rope_dim = fields.integer("qk_rope_head_dim")
    if rope_dim % 2 or rope_dim < 4:
        raise fields.error("qk_rope_head_dim", f"{rope_dim} is not an even number of 4 or more")
    return LatentSpec(
        rank=fields.integer("kv_lora_rank"),
        rope_dim=rope_dim,
        plain_dim=fields.integer("qk_nope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        query_rank=None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        interleaved=family == "deepseek_v2" or fields.flag("rope_interleave", True),
    )


def _mixtral(fields: ConfigFields, layers: int) -> ExpertsSpec:
    return ExpertsSpec(
        sparse=(True,) * layers,
        count=fields.integer("num_local_experts"),
        chosen=fields.integer("num_experts_per_tok"),
        ffn_size=fields.integer("intermediate_size"),
        normalise=True,
    )


def _qwen3_moe(fields: ConfigFields, layers: int) -> ExpertsSpec:
    """The count is `num_experts` in released models, `num_local_experts` where transformers 5
    wrote the file. Implementations differ in which layers a window is for; no released model
    of this family has one."""
    if fields.flag("use_sliding_window", False):
        raise fields.error("use_sliding_window", "true is not supported for Qwen3-MoE")
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise fields.error("mlp_only_layers", f"{dense!r} is not a list of layers")
    return ExpertsSpec(
        sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        count=fields.integer("num_experts", fields.integer("num_local_experts", 128)),
        chosen=fields.integer("num_experts_per_tok"),
        ffn_size=fields.integer("moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob", False),
    )


def _deepseek_v2(fields: ConfigFields, layers: int) -> ExpertsSpec:
    """DeepSeek-AI 2024, arXiv:2405.04434. Implementations differ in what normalised weights
    are scaled by; no released model of this family normalises them."""
    if fields.flag("norm_topk_prob", False):
        raise fields.error("norm_topk_prob", "true is not supported for DeepSeek-V2")
    _only(fields, "scoring_func", "softmax")
    plain = replace(
        _deepseek(fields, layers),
        scale=fields.number("routed_scaling_factor"),
    )
    method = fields.get("topk_method", "greedy")
    if method == "greedy":
        return plain
    if method == "group_limited_greedy":
        groups, chosen = fields.integer("n_group"), fields.integer("topk_group")
        return replace(plain, groups=groups, chosen_groups=chosen)
    known = "greedy or group_limited_greedy"
    raise fields.error("topk_method", f"{method!r} is not supported; use {known}")


def _deepseek_v3(fields: ConfigFields, layers: int) -> ExpertsSpec:
    """DeepSeek-AI 2024, arXiv:2412.19437. The layers that predict further tokens
    (`num_nextn_predict_layers`) are not part of the model that is computed here."""
    _only(fields, "scoring_func", "sigmoid")
    _only(fields, "topk_method", "noaux_tc")
    groups = fields.integer("n_group")
    return replace(
        _deepseek(fields, layers),
        scoring="sigmoid",
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor"),
        correction=True,
        groups=groups,
        chosen_groups=fields.integer("topk_group"),
        group_best=2 if groups > 1 else 1,
    )


def _deepseek(fields: ConfigFields, layers: int) -> ExpertsSpec:
    """What both have."""
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", "only 1 is supported")
    dense = fields.count("first_k_dense_replace", 0)
    ffn_size = fields.integer("moe_intermediate_size")
    return ExpertsSpec(
        sparse=tuple(index >= dense for index in range(layers)),
        count=fields.integer("n_routed_experts"),
        chosen=fields.integer("num_experts_per_tok"),
        ffn_size=ffn_size,
        shared_ffn_size=ffn_size * fields.count("n_shared_experts", 0),
    )


def _only(fields: ConfigFields, field: str, value: str) -> None:
    found = fields.get(field, value)
    if found != value:
        raise fields.error(field, f"{found!r} is not supported for this family; only {value!r} is")


_EXPERTS = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
