"""The specification of experts and of multi-head latent attention, read from `config.json`.

The module has the facts that a family fixes in its code, above all the choice of experts. It
rejects by name what this engine would compute wrongly. It knows no tensors; values are immutable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from baton.engine.spec.config_fields import ConfigFields
from baton.engine.spec.rope_spec import RopeSpec, yarn_magnitude


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The mixture layers of a model, and the rule that chooses a token's experts (see
    `experts.route`)."""

    sparse: tuple[bool, ...]  # per layer; the others have a dense MLP
    count: int
    chosen: int  # per token
    ffn_size: int  # of one expert
    shared_ffn_size: int = 0  # of all shared experts together; 0: none
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = False  # weights sum to 1 before `scale`
    scale: float = 1.0
    correction: bool = False  # a learned bias affects the choice only
    groups: int = 1
    chosen_groups: int = 1  # groups that a token may use
    group_best: int = 1  # best experts that score a group
    held: tuple[int, int] | None = None  # first and end of a rank's experts; None: all


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: keys and values are low-rank products of one latent vector
    per token; one further rotated key part is shared by all heads."""

    rank: int  # of the latent
    rope_dim: int  # of the shared rotated key part
    plain_dim: int  # of a head's key part without positions
    value_dim: int  # of a head
    query_rank: int | None  # None: no low-rank queries
    interleaved: bool  # rotated pairs are adjacent entries

    @property
    def width(self) -> int:
        """Return how many numbers the pool stores per token and layer."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Return the size of one head's query."""
        return self.plain_dim + self.rope_dim

    def softmax_scale(self, rope: RopeSpec) -> float:
        """Return 1 / sqrt(query_dim), times the square of YaRN's magnitude for `mscale_all_dim`."""
        scale = 1.0 / math.sqrt(self.query_dim)
        if rope.kind == "yarn" and rope.mscale_all_dim:
            scale *= yarn_magnitude(rope.factor, rope.mscale_all_dim) ** 2
        return scale


def read_experts(fields: ConfigFields, family: str, layers: int) -> ExpertsSpec | None:
    """Read the mixture's facts; None for a dense family. Raises ModelError with file, field and
    remedy."""
    reader = _EXPERTS.get(family)
    if reader is None:
        return None
    spec = reader(fields, layers)
    if spec.chosen > spec.count:
        raise fields.error(
            "num_experts_per_tok", f"{spec.chosen} is more than the {spec.count} experts"
        )
    if spec.count % spec.groups:
        raise fields.error("n_group", f"{spec.groups} does not divide {spec.count} experts")
    members = spec.count // spec.groups
    if not spec.chosen_groups <= spec.groups or spec.chosen_groups * members < spec.chosen:
        raise fields.error(
            "topk_group",
            f"{spec.chosen_groups} of {spec.groups} groups of {members} experts do not offer the "
            f"{spec.chosen} that a token needs",
        )
    if members < spec.group_best:
        raise fields.error(
            "n_group", f"a group has {members} experts, fewer than {spec.group_best}"
        )
    return spec


def read_latent(fields: ConfigFields, family: str) -> LatentSpec | None:
    """Read the facts of latent attention; None for a family with keys and values per head.
    Raises ModelError."""
    if family not in ("deepseek_v2", "deepseek_v3"):
        return None
    heads, kv_heads = fields.integer("num_attention_heads"), fields.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise fields.error("num_key_value_heads", f"{kv_heads!r} differs from the {heads} heads")
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
    """Read Qwen3-MoE. The count is `num_experts` in released models, `num_local_experts` in files
    that transformers 5 wrote. Implementations disagree about the layers that have a window; no
    released model of this family has one."""
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
    """Read DeepSeek-V2 (DeepSeek-AI 2024, arXiv:2405.04434). Implementations disagree about the
    scale of normalised weights; no released model of this family normalises them."""
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
    """Read DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437). The engine does not compute the
    layers that predict further tokens (`num_nextn_predict_layers`)."""
    _only(fields, "scoring_func", "sigmoid")
    _only(fields, "topk_method", "noaux_tc")
    groups = fields.integer("n_group")
    return replace(
        _deepseek(fields, layers),
        scoring="sigmoid",
        normalise=fields.with_defaults({"norm_topk_prob": True}).flag("norm_topk_prob", False),
        scale=fields.number("routed_scaling_factor"),
        correction=True,
        groups=groups,
        chosen_groups=fields.integer("topk_group"),
        group_best=2 if groups > 1 else 1,
    )


def _deepseek(fields: ConfigFields, layers: int) -> ExpertsSpec:
    """Read the fields that DeepSeek-V2 and DeepSeek-V3 share."""
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
