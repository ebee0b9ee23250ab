"""Random weights whose output depends on every KV block, as a safetensors file.

Plain random weights make a poor test model: attention averages to nothing and greedy output
repeats itself. Here every branch of every layer adds about as much as the embedding did, and
attention is sharp enough to pick single tokens out of a long context. One coordinate of the
residual stream is the same constant for every token, so that the output matrix can hold a
bias: special and unused ids are never drawn, words more often than fragments.

Knows shapes and numbers only; numpy alone, so that a seed gives the same weights anywhere.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Family = Literal["qwen3", "llama"]
WeightDtype = Literal["float32", "bfloat16"]
_DTYPE_NAMES: dict[WeightDtype, str] = {"float32": "F32", "bfloat16": "BF16"}
_Array = NDArray[np.float32]

_SHARPNESS = 2.0  # of queries and of keys: attention logits have a deviation of its square
_ATTENTION_GAIN = 1.7  # undoes the averaging over a few tokens
_MLP_GAIN = 1.7  # undoes silu(a) * b, whose deviation is 0.6 for normal a and b
_LOGIT_DEVIATION = 2.5
_CONSTANT = 4.0  # coordinate 0 of the residual stream
_NEVER = -40.0  # bias of a logit
_SELDOM = -4.0
ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RandomShape:
    """Sizes of a dense decoder; counts, `context` in tokens."""

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int


def write_weights(
    path: Path,
    shape: RandomShape,
    dtype: WeightDtype,
    seed: int,
    said: Collection[int],
    known: Collection[int],
) -> None:
    """Write `path`. `said` are the ids that may well be drawn, `known` those that may be drawn
    at all; each tensor depends on the seed and its own name alone."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts = []
    end = 0
    for name, values in _tensors(shape, seed, said, known):
        part = (values if dtype == "float32" else _bfloat16(values)).tobytes()
        offsets = [end, end := end + len(part)]
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": values.shape,
            "data_offsets": offsets,
        }
        parts.append(part)
    _write_safetensors(path, header, parts)


def _write_safetensors(path: Path, header: dict[str, object], parts: list[bytes]) -> None:
    """The format of the safetensors project: length of the header in 8 bytes, a JSON header
    padded with spaces to a multiple of 8, and the tensors' bytes one after another."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.writelines(parts)


def _tensors(
    shape: RandomShape, seed: int, said: Collection[int], known: Collection[int]
) -> Iterator[tuple[str, _Array]]:
    embedding = _normal(seed, "embedding", shape.vocab, shape.hidden, 1.0)
    embedding[:, 0] = _CONSTANT
    yield "model.embed_tokens.weight", embedding
    for layer in range(shape.layers):
        yield from _layer(shape, seed, f"model.layers.{layer}")
    yield "model.norm.weight", np.ones(shape.hidden, np.float32)
    yield "lm_head.weight", _head(shape, seed, said, known)


def _layer(shape: RandomShape, seed: int, prefix: str) -> Iterator[tuple[str, _Array]]:
    hidden, ffn = shape.hidden, shape.ffn
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    normed = shape.family == "qwen3"  # queries and keys are normalized, then scaled
    matrices = {  # name: (out, in, deviation of one output for inputs of deviation 1)
        "self_attn.q_proj": (queries, hidden, 1.0 if normed else _SHARPNESS),
        "self_attn.k_proj": (keys, hidden, 1.0 if normed else _SHARPNESS),
        "self_attn.v_proj": (keys, hidden, 1.0),
        "self_attn.o_proj": (hidden, queries, _ATTENTION_GAIN),
        "mlp.gate_proj": (ffn, hidden, 1.0),
        "mlp.up_proj": (ffn, hidden, 1.0),
        "mlp.down_proj": (hidden, ffn, _MLP_GAIN),
    }
    for name, (rows, columns, deviation) in matrices.items():
        matrix = _normal(seed, f"{prefix}.{name}", rows, columns, deviation / columns**0.5)
        if name.endswith(("o_proj", "down_proj")):
            matrix[0] = 0.0  # coordinate 0 stays what the embedding made it
        else:
            matrix[:, 0] = 0.0  # and says nothing to the layers
        yield f"{prefix}.{name}.weight", matrix
    if normed:
        scale = np.full(shape.head_dim, _SHARPNESS, np.float32)
        yield f"{prefix}.self_attn.q_norm.weight", scale
        yield f"{prefix}.self_attn.k_norm.weight", scale
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", np.ones(hidden, np.float32)


def _head(shape: RandomShape, seed: int, said: Collection[int], known: Collection[int]) -> _Array:
    head = _normal(seed, "head", shape.vocab, shape.hidden, _LOGIT_DEVIATION / shape.hidden**0.5)
    bias = np.full(shape.vocab, _NEVER, np.float32)
    bias[list(known)] = _SELDOM
    bias[list(said)] = 0.0
    stream = (1.0 + 2.0 * shape.layers) ** 0.5  # its deviation after two branches per layer
    head[:, 0] = bias * stream / _CONSTANT
    return head


def _normal(seed: int, name: str, rows: int, columns: int, deviation: float) -> _Array:
    source = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = source.standard_normal((rows, columns), dtype=np.float32)
    values *= np.float32(deviation)
    return values


def _bfloat16(values: _Array) -> NDArray[np.uint16]:
    """Round to nearest, ties to even: the upper half of the float32 bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits >> np.uint32(16)).astype(np.uint16)
