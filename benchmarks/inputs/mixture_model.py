"""A mixture of experts made of the embedded model, which answers nearly as it does.

Each expert is the MLP of its layer with small changes of its own, so that the answers are sentences
with the words that stop strings look for, and an expert that is left out or taken twice changes
them. The gate is random. Holds no state.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.models.embedded import embedded_model

EXPERTS, CHOSEN = 4, 2
CHANGED = 0.05  # of an expert's weights: the standard deviation over the weight itself
GATE = 0.1  # standard deviation of a gate's weights
SEED = 7
_MATRICES = ("gate_proj", "up_proj", "down_proj")
_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


def mixture_model(folder: Path) -> Path:
    """Return `folder` with the model in it, made if missing: Qwen3-MoE, bf16."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    source = embedded_model()
    config = json.loads((source / "config.json").read_text())
    dice = torch.Generator().manual_seed(SEED)
    tensors = load_file(source / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        tensors |= _experts(tensors, f"model.layers.{layer}.mlp.", dice)
    save_file(tensors, folder / "model.safetensors")
    for name in _FILES:
        shutil.copy(source / name, folder / name)
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": config["intermediate_size"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "norm_topk_prob": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))  # last: it makes it whole
    return folder


def _experts(tensors: dict[str, Tensor], mlp: str, dice: torch.Generator) -> dict[str, Tensor]:
    """Take the MLP of a layer out of `tensors`; return its experts and their gate."""
    made = {}
    for matrix in _MATRICES:
        weight = tensors.pop(f"{mlp}{matrix}.weight")  # [out, in]
        for expert in range(EXPERTS):
            changes = 1 + CHANGED * torch.randn(weight.shape, generator=dice)
            made[f"{mlp}experts.{expert}.{matrix}.weight"] = (weight * changes).to(weight.dtype)
    hidden = made[f"{mlp}experts.0.gate_proj.weight"].shape[1]
    gate = GATE * torch.randn((EXPERTS, hidden), generator=dice)
    made[f"{mlp}gate.weight"] = gate.to(torch.bfloat16)
    return made
