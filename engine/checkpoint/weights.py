"""Reads a model's weights from the safetensors files of a Hugging Face folder.

The module knows the names of a decoder layer's tensors. It rejects by name a tensor that does not
fit the spec, or that the spec does not use. It keeps no state; the decoder owns the weights.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.checkpoint.moe_weights import read_expert_weights, read_latent_weights
from baton.engine.checkpoint.rank_shards import RankShards
from baton.engine.checkpoint.shards import Progress, Shards
from baton.engine.checkpoint.weight_reader import Parts, WeightReader, float_dtype
from baton.engine.memory.host_memory import release_freed_memory
from baton.engine.model.linear import Linear
from baton.engine.model.matrix_backend import MatrixBackend
from baton.engine.model.weights import LayerWeights, MlpWeights, Weights
from baton.engine.spec.model_spec import ModelSpec
from baton.engine.spec.quantization_config import LoadQuantization
from baton.engine.spec.rank_split import RankSplit, spec_of_rank
from baton.runtime.errors import ConfigError

_THREADS = 4  # each briefly holds a matrix twice
# Tensors that the engine ignores: it computes rotary angles, and does not quantise activations
# or KV by stored scales.
_SPARE = re.compile(r"\.(rotary_emb\.inv_freq|masked_bias|input_scale|[kv]_scale)$")


@release_freed_memory()
def load_weights(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    matrices: MatrixBackend,
    progress: Progress | None = None,
    quantization: LoadQuantization = "none",
    *,
    split: RankSplit | None = None,
) -> Weights:
    """Read all tensors that `spec` needs, converted to `dtype`, several layers at once.

    `matrices` prepares them for its device. `quantization` applies to unquantised matrices except
    the head. `split`: read one rank's share; `spec` describes the whole model all the same.
    `progress` is called from several threads, one at a time.
    Raises ModelError with file, tensor and expected shape for a missing or truncated shard, a
    missing or unused tensor, a wrong shape or dtype, quantised values out of range, and values
    that are not finite. Raises ConfigError if `quantization` is set for quantised weights.
    """
    if quantization != "none" and spec.quantization is not None:
        raise ConfigError(
            f"worker.quantization is {quantization!r}, but the weights in {folder} are quantised "
            f"already ({spec.quantization.layout}): give none"
        )
    shards = Shards(folder, progress)
    if split is not None:
        shards, spec = RankShards(folder, spec, split, progress), spec_of_rank(spec, split)
    reader = WeightReader(shards, dtype, matrices, spec.quantization, quantization)
    # The largest first, while memory is free: packing holds a matrix twice for a moment.
    embedding = reader.table(_embedding(spec), spec.vocab_size, spec.hidden_size)
    head = (
        matrices.plain(embedding)
        if spec.tied_embeddings
        else reader.with_dtype(dtype).matrix([(_head(spec), spec.vocab_size)], spec.hidden_size)
    )
    final_norm = _norm(reader, spec, f"{spec.tensor_prefix}norm.weight", spec.hidden_size)
    layers = _layers(reader, spec)
    _refuse_unused(shards, spec)
    shards.finish()
    return Weights(embedding, layers, final_norm, head)


def load_embedding(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, matrices: MatrixBackend
) -> Tensor:
    """Read the embedding alone, [vocab, hidden]. Raises ModelError like `load_weights`."""
    reader = WeightReader(Shards(folder), dtype, matrices, spec.quantization)
    return reader.table(_embedding(spec), spec.vocab_size, spec.hidden_size)


def source_dtype(folder: Path, spec: ModelSpec) -> torch.dtype:
    """Return the dtype that the embedding is stored in. Raises ModelError."""
    return float_dtype(Shards(folder), _embedding(spec))


def _embedding(spec: ModelSpec) -> str:
    return f"{spec.tensor_prefix}embed_tokens.weight"


def _head(spec: ModelSpec) -> str:
    return f"{spec.tensor_prefix.removesuffix('model.')}lm_head"


def _layers(reader: WeightReader, spec: ModelSpec) -> tuple[LayerWeights, ...]:
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "load")
    try:
        return tuple(pool.map(lambda index: _layer(reader, spec, index), range(spec.layers)))
    finally:
        pool.shutdown(cancel_futures=True)


def _layer(reader: WeightReader, spec: ModelSpec, index: int) -> LayerWeights:
    base = f"{spec.tensor_prefix}layers.{index}."
    hidden, ffn = spec.hidden_size, spec.ffn_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    values = spec.heads * (spec.latent.value_dim if spec.latent else spec.head_dim)
    qkv = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
    gate_up = [("mlp.gate_proj", ffn), ("mlp.up_proj", ffn)]
    if spec.fused_tensors:
        qkv = [("self_attn.qkv_proj", queries + 2 * keys)]
        gate_up = [("mlp.gate_up_proj", 2 * ffn)]
    after = "post_attention_layernorm"

    def norm(name: str, size: int = hidden) -> Tensor:
        return _norm(reader, spec, f"{base}{name}.weight", size)

    def matrix(parts: Parts, columns: int, bias: bool) -> Linear:
        named = [(f"{base}{name}", rows) for name, rows in parts]
        return reader.matrix(named, columns, bias=bias)

    return LayerWeights(
        input_norm=norm("input_layernorm"),
        qkv=read_latent_weights(reader, base, hidden, spec.heads, spec.latent)
        if spec.latent
        else matrix(qkv, hidden, spec.qkv_bias),
        q_norm=norm("self_attn.q_norm", spec.head_dim) if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm", spec.head_dim) if spec.qk_norm else None,
        output=matrix([("self_attn.o_proj", hidden)], values, spec.output_bias),
        attention_norm=norm(after) if spec.output_norms else None,
        mlp_norm=norm("pre_feedforward_layernorm" if spec.output_norms else after),
        mlp=read_expert_weights(reader, base, spec.family, hidden, spec.experts)
        if spec.experts and spec.experts.sparse[index]
        else MlpWeights(
            gate_up=matrix(gate_up, hidden, spec.mlp_bias),
            down=matrix([("mlp.down_proj", hidden)], ffn, spec.mlp_bias),
        ),
        output_norm=norm("post_feedforward_layernorm") if spec.output_norms else None,
    )


def _norm(reader: WeightReader, spec: ModelSpec, name: str, size: int) -> Tensor:
    weight = reader.vector(name, size)
    return weight.to(torch.float32) + 1.0 if spec.norm_adds_one else weight


def _refuse_unused(shards: Shards, spec: ModelSpec) -> None:
    """Raise ModelError for a tensor that config.json does not imply: a further layer, bias or norm
    would change every output."""
    ours = (
        (spec.tensor_prefix,) if spec.tied_embeddings else (spec.tensor_prefix, f"{_head(spec)}.")
    )
    last = spec.layers + spec.further_layers
    further = tuple(f"{spec.tensor_prefix}layers.{n}." for n in range(spec.layers, last))
    for stored in shards.unused():
        if stored.name.startswith(further):
            continue
        if not stored.name.startswith(ours) or _SPARE.search(stored.name):
            continue
        with shards.open(stored.name) as values:
            nothing = stored.name.endswith(".bias") and not values.any()  # GPTQ writes zero biases
        if not nothing:
            raise stored.error(
                f"is not part of a {spec.family} model of {spec.layers} layers as config.json "
                "describes it; use the config.json that belongs to these weights"
            )
