"""The trained models' shapes, and how a trained model becomes a Hugging Face folder.

bfloat16 safetensors, config.json, generation_config.json, tokenizer and template: what `engine`
and transformers load. The draft model has the same tokenizer. Keeps no state.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from baton.models.training import tiny_tokenizer
from baton.models.training.training_model import NORM_EPS, ROPE_THETA, TinyShape, TrainingModel
from baton.runtime.errors import ConfigError

MAX_PARAMETERS = {"baton-tiny": 6_000_000, "baton-tiny-draft": 1_000_000}
MAX_BYTES = 12_000_000  # of the weights of the larger one
_ROWS_OF = 64  # the embedding's rows are a multiple of it


def shape_of(name: str, vocab: int) -> TinyShape:
    """The shape of "baton-tiny" or "baton-tiny-draft" for `vocab` tokenizer entries."""
    rows = -(-vocab // _ROWS_OF) * _ROWS_OF
    if name == "baton-tiny":
        return TinyShape(6, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=640, vocab=rows)
    return TinyShape(3, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=rows)


def write_model(
    folder: Path, model: TrainingModel, tokenizer: Tokenizer, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """The model in `folder`, which is made if missing; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.to(dtype).contiguous() for name, w in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer.write(tokenizer, folder, model.shape.context)
    end, pad = (tokenizer.token_to_id(text) for text in (tiny_tokenizer.END, tiny_tokenizer.PAD))
    ends = {"eos_token_id": end, "pad_token_id": pad}
    _write_json(folder / "generation_config.json", {**ends, "do_sample": False})
    kind = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", {**_config(model.shape, kind), **ends})
    return folder


def read_model(folder: Path) -> TrainingModel:
    """Read a model that `write_model` wrote, ready for training. Raises ConfigError if there is
    none."""
    try:
        content = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
    except OSError as error:
        raise ConfigError(
            f"{folder} holds no trained model ({error}): train it with `make models`"
        ) from error
    model = TrainingModel(_shape(content))
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model


def _shape(content: dict[str, int]) -> TinyShape:
    return TinyShape(
        layers=content["num_hidden_layers"],
        hidden=content["hidden_size"],
        heads=content["num_attention_heads"],
        kv_heads=content["num_key_value_heads"],
        head_dim=content["head_dim"],
        ffn=content["intermediate_size"],
        vocab=content["vocab_size"],
        context=content["max_position_embeddings"],
    )


def _config(shape: TinyShape, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "bos_token_id": None,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
