"""Random-weight models of any shape as Hugging Face folders, for benchmarks and tests.

They answer with noise, but real noise: every part of serving is exercised, and a wrong KV
block changes the answer. The tokenizer is baton-tiny's. Written without transformers or torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import Tokenizer

from baton.models import random_weights
from baton.models.embedded import embedded_model
from baton.models.random_weights import Family, RandomShape, WeightDtype
from baton.models.training import tiny_tokenizer
from baton.runtime.errors import ConfigError

CONTEXT_TOKENS = 2048
_WORD = re.compile(r"Ġ[A-Za-z]{2,}|[.,;:!?]")  # Ġ stands for a space in byte-level BPE
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def make_shaped_model(
    folder: Path,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    dtype: WeightDtype,
    seed: int,
    family: Family = "qwen3",
    context: int = CONTEXT_TOKENS,
) -> Path:
    """A model of the given shape in `folder`, which is made if missing; returns it.

    `vocab` may exceed the tokenizer's entries; the ids above are never drawn. All of it is
    held in memory once while it is written. Raises ConfigError for sizes that do not fit.
    """
    tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    entries = tokenizer.get_vocab_size()
    if vocab < entries:
        raise ConfigError(f"vocab is {vocab}: give {entries} or more")
    if heads % kv_heads:
        raise ConfigError(f"heads is {heads}: give a multiple of kv_heads ({kv_heads})")
    folder.mkdir(parents=True, exist_ok=True)
    shape = RandomShape(family, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context)
    tiny_tokenizer.write(tokenizer, folder, context)
    words = sorted(i for entry, i in tokenizer.get_vocab().items() if _WORD.fullmatch(entry))
    random_weights.write_weights(
        folder / "model.safetensors",
        shape,
        dtype,
        seed,
        said=words,
        known=range(len(tiny_tokenizer.SPECIAL_TOKENS), entries),
    )
    end, pad = (tokenizer.token_to_id(t) for t in (tiny_tokenizer.END, tiny_tokenizer.PAD))
    ends = {"eos_token_id": end, "pad_token_id": pad}
    _write_json(folder / "generation_config.json", {**ends, "do_sample": True})
    _write_json(folder / "config.json", {**_config(shape, dtype), **ends})
    return folder


def _config(shape: RandomShape, dtype: WeightDtype) -> dict[str, object]:
    return {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": random_weights.ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": None,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
