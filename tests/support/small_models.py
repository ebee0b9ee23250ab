"""Small random models of each family, by their names: what makes them, and transformers' answers.

Knows no engine of ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SHAPE = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": False,  # tied, the scaled embedding alone would decide the tokens
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,  # with what follows, 22 tokens behind a prefix of 68 are expanded
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_MSCALE = {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 8.0}


_TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.2, 3.0, 7.0, 20.0],
}
# name -> (class prefix in transformers, what differs from _SHAPE)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "num_key_value_heads": 4}),
    "llama-mlp-biased": ("Llama", {"mlp_bias": True, "head_dim": 20}),
    "llama-llama3-rope": ("Llama", {"rope_scaling": _LLAMA3, "tie_word_embeddings": True}),
    "llama-linear-rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic-rope": ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-yarn-rope": ("Llama", {"rope_scaling": _YARN, "rope_theta": 20000.0}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "layer_types": _LAYERS},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_theta": 1000000.0}),
    "qwen3-window": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "sliding_window": 16}),
    "gemma3": (
        "Gemma3",
        {**_GEMMA, "sliding_window": 11, "layer_types": _LAYERS, "rope_parameters": _TWO_ROPES},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 30}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**_EXPERTS, "num_experts": 6, "norm_topk_prob": True, "head_dim": 24},
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            **_EXPERTS,
            "num_experts": 4,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **_LATENT,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "q_lora_rank": None,
            "rope_scaling": _MSCALE,
        },
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {
            **_LATENT,
            "n_routed_experts": 8,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "n_routed_experts": 8,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": _MSCALE,
        },
    ),
    "deepseek-v3-plain": (
        "DeepseekV3",
        {
            **_LATENT,
            "n_routed_experts": 4,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
    ),
}
# Those of `make test`: each has a mechanism that no other has. The rest vary one of these.
REPRESENTATIVES = {
    "llama-llama3-rope",
    "qwen3-window",  # norms of queries and keys, a window in some layers
    "gemma2",  # soft caps, norms after
    "mixtral",
    "deepseek-v3",
}
_WIDE = {"head_dim": 64, "max_position_embeddings": 1100}
# Held by tests of their own.
SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-longrope": (
        "Phi3",
        {
            "rope_scaling": _LONGROPE,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 128,
        },
    ),
    # Of sizes that the bfloat16 kernels take.
    "qwen3-wide": ("Qwen3", {**_WIDE, "num_attention_heads": 6}),
    "gemma2-wide": (
        "Gemma2",
        {**_GEMMA, **_WIDE, "attn_logit_softcapping": 2.0, "sliding_window": 70},
    ),
    "mixtral-wide": ("Mixtral", {**_WIDE, "num_local_experts": 4, "sliding_window": 30}),
    # Of a number of heads that two ranks cannot divide.
    "llama-three-heads": (
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
    ),
    # As small as a story under Triton's interpreter wants them.
    "qwen3-window-small": (
        "Qwen3",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "deepseek-v3-small": (
        "DeepseekV3",
        {
            **MODELS["deepseek-v3"][1],
            "num_hidden_layers": 2,
            "q_lora_rank": 32,  # with the next, whole groups for quantised matrices
            "moe_intermediate_size": 48,
        },
    ),
}


@dataclass(frozen=True)
class Reference:
    """A model by transformers, and the folder that it was saved to."""

    name: str
    folder: Path
    model: Any

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab]"""
        with torch.inference_mode():
            found: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return found

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        with torch.inference_mode():
            out = self.model(torch.tensor([list(prompt)]), use_cache=True)
            tokens = [int(out.logits[0, -1].argmax())]
            while len(tokens) < steps:
                last = torch.tensor([[tokens[-1]]])
                out = self.model(last, past_key_values=out.past_key_values, use_cache=True)
                tokens.append(int(out.logits[0, -1].argmax()))
        return tokens


def make_model(name: str, folder: Path, **save: Any) -> Reference:
    prefix, changes = {**MODELS, **SPECIAL}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        kind = "Gemma3Text" if prefix == "Gemma3" else prefix
        config = getattr(transformers, f"{kind}Config")(**{**_SHAPE, **changes})
        config._attn_implementation = "eager"  # the others have no soft caps
        torch.manual_seed(len(name) * 7 + 1)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
        with torch.no_grad():  # biases and norms start as zeros and ones: make them count
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn_like(buffer) * 0.2)
        model.save_pretrained(folder, **save)
    return Reference(name, folder, model)
