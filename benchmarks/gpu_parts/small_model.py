"""A small random model as a folder that the engine loads: config.json and safetensors, and a
tokenizer of single characters for grammars."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _DIM, _FFN, _VOCAB = 64, 3, 4, 2, 32, 96, 199
END = 2  # the token that ends an answer
_SPECIAL = ("<pad>", "<begin>", "<end>")


def write_small_model(folder: Path, qk_norm: bool) -> None:
    """`qk_norm`: a Qwen3, else a Llama. Float32; its logits spread widely enough that rounding
    decides no token."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if qk_norm else "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _DIM,
        "vocab_size": _VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    generator = torch.Generator().manual_seed(7 + qk_norm)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.25

    def norm(size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    tensors = {
        "model.embed_tokens.weight": matrix(_VOCAB, _HIDDEN),
        "model.norm.weight": norm(_HIDDEN),
        "lm_head.weight": matrix(_VOCAB, _HIDDEN),
    }
    for layer in range(_LAYERS):
        base = f"model.layers.{layer}."
        sizes = {"q": _HEADS, "k": _KV_HEADS, "v": _KV_HEADS}
        for name, heads in sizes.items():
            tensors[f"{base}self_attn.{name}_proj.weight"] = matrix(heads * _DIM, _HIDDEN)
        tensors[f"{base}self_attn.o_proj.weight"] = matrix(_HIDDEN, _HEADS * _DIM)
        for name in ("gate", "up"):
            tensors[f"{base}mlp.{name}_proj.weight"] = matrix(_FFN, _HIDDEN)
        tensors[f"{base}mlp.down_proj.weight"] = matrix(_HIDDEN, _FFN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{base}{name}.weight"] = norm(_HIDDEN)
        if qk_norm:
            for name in ("q_norm", "k_norm"):
                tensors[f"{base}self_attn.{name}.weight"] = norm(_DIM)
    save_file(tensors, folder / "model.safetensors")


def text_of(tokens: list[int]) -> str:
    """The text of tokens that have one, without the end. Raises KeyError for any other token."""
    characters = {token: character for character, token in _tokens().items()}
    return "".join(characters[token] for token in tokens if token != END).replace("\u0120", " ")


def _tokens() -> dict[str, int]:
    """Special tokens, then one for each printable character; the others of the model have none."""
    printable = [chr(code) for code in range(33, 127)] + ["\u0120"]  # byte-level BPE's space
    return {text: token for token, text in enumerate((*_SPECIAL, *printable))}


def _tokenizer() -> dict[str, object]:
    """A `tokenizer.json` of byte-level BPE without merges."""
    added = [
        {"id": token, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for token, text in enumerate(_SPECIAL)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level | {"use_regex": True},
        "decoder": level | {"use_regex": True},
        "model": {"type": "BPE", "vocab": _tokens(), "merges": []},
    }
