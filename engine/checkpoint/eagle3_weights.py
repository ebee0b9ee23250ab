"""Reads an EAGLE-3 head's weights from the safetensors files of its folder.

    midlayer.*    SafeAILab, SpecForge        fc, norm, lm_head, d2t; embed_tokens where it has
    layers.0.*    speculators                 one of its own

`t2d` says which tokens have a draft token, which follows from `d2t`. What is of another kind of
head, and any other tensor that is not known, is refused by name. Keeps no state.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.checkpoint.shard_files import shard_files
from baton.engine.checkpoint.shard_headers import read_header
from baton.engine.checkpoint.shards import Shards
from baton.engine.checkpoint.weight_reader import WeightReader
from baton.engine.memory.host_memory import release_freed_memory
from baton.engine.model.eagle3_head import Eagle3Weights
from baton.engine.model.matrix_backend import MatrixBackend
from baton.engine.model.weights import MlpWeights
from baton.engine.spec.eagle3_spec import STATES, Eagle3Spec
from baton.runtime.errors import ModelError

_FUSE = "fc.weight"
_LAYERS = ("midlayer.", "layers.0.")
# What training keeps beside a head, and angles that are computed here.
_SPARE = re.compile(r"^t2d$|^verifier_|\.rotary_emb\.inv_freq$")


def fused_columns(folder: Path) -> int:
    """Return how many numbers a head's `fc` reads of its target for a token; 0 where the folder
    holds no such tensor. Raises ModelError."""
    for path in shard_files(folder):
        for tensor in read_header(path):
            if tensor.name == _FUSE and len(tensor.shape) == 2:
                return tensor.shape[1]
    return 0


@release_freed_memory()
def load_eagle3_weights(
    folder: Path,
    spec: Eagle3Spec,
    dtype: torch.dtype,
    matrices: MatrixBackend,
    target_embedding: Callable[[], Tensor],  # [vocab, hidden]
) -> Eagle3Weights:
    """Read all tensors of a head, converted to `dtype`; `target_embedding` is called if the head
    has none of its own. Raises ModelError like `load_weights`."""
    shards, layer = Shards(folder), spec.layer
    reader = WeightReader(shards, dtype, matrices)
    base = next((base for base in _LAYERS if f"{base}hidden_norm.weight" in shards), _LAYERS[0])
    hidden, ffn, vocab = layer.hidden_size, layer.ffn_size, layer.vocab_size
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    attention, mlp = f"{base}self_attn.", f"{base}mlp."
    qkv = [
        (f"{attention}q_proj", queries),
        (f"{attention}k_proj", keys),
        (f"{attention}v_proj", keys),
    ]
    gate_up = [(f"{mlp}gate_proj", ffn), (f"{mlp}up_proj", ffn)]
    has_table = "embed_tokens.weight" in shards
    weights = Eagle3Weights(
        embedding=reader.table("embed_tokens.weight", vocab, hidden)
        if has_table
        else target_embedding(),
        fuse=reader.matrix([("fc", hidden)], STATES * spec.target_hidden_size),
        input_norm=reader.vector(f"{base}input_layernorm.weight", hidden),
        hidden_norm=reader.vector(f"{base}hidden_norm.weight", hidden),
        qkv=reader.matrix(qkv, 2 * hidden, bias=layer.qkv_bias),
        output=reader.matrix([(f"{attention}o_proj", hidden)], queries, bias=layer.output_bias),
        mlp_norm=reader.vector(f"{base}post_attention_layernorm.weight", hidden),
        mlp=MlpWeights(
            gate_up=reader.matrix(gate_up, hidden, bias=layer.mlp_bias),
            down=reader.matrix([(f"{mlp}down_proj", hidden)], ffn, bias=layer.mlp_bias),
        ),
        final_norm=reader.vector("norm.weight", hidden),
        head=reader.matrix([("lm_head", spec.draft_vocab_size)], hidden),
        target_ids=_target_ids(shards, spec),
    )
    for stored in shards.unused():
        if not _SPARE.search(stored.name):
            raise stored.error("is no part of an EAGLE-3 head that is computed here")
    shards.finish()
    return weights


def _target_ids(shards: Shards, spec: Eagle3Spec) -> Tensor:
    """The target's token of each draft token: `d2t` holds the differences of their numbers."""
    vocab, count = spec.layer.vocab_size, spec.draft_vocab_size
    ids = torch.arange(count)
    if "d2t" not in shards:
        if count != vocab:
            raise ModelError(
                f"{shards.folder}: tensor d2t is missing, and the draft vocabulary has {count} of "
                f"{vocab} tokens; download the head again"
            )
        return ids
    stored = shards.find("d2t", (count,))
    if stored.shape != (count,) or stored.dtype not in ("I64", "I32"):
        raise stored.error(f"is not one whole number for each of {count} draft tokens")
    with shards.open("d2t") as differences:
        ids = ids + differences.to(torch.int64)
    low, high, distinct = int(ids.min()), int(ids.max()), len(set(ids.tolist()))
    if low < 0 or high >= vocab or distinct != count:
        raise stored.error(
            f"names {distinct} tokens from {low} to {high}, and {count} of 0 to {vocab - 1} are "
            "needed; download the head again"
        )
    return ids
