"""A model's weights, read from the safetensors files of a Hugging Face folder.

Files are memory-mapped and read once, tensor by tensor, into matrices of our own: query, key
and value in one, gate and up in one. Whatever does not fit the spec is refused by name. The
weights are immutable after loading and belong to the decoder.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.config_fields import read_fields
from baton.engine.linear import Matrix
from baton.engine.spec import ModelSpec
from baton.runtime.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SOURCE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in], with their biases; absent norms are None.
    Norms that the file holds less one are float32, one included."""

    input_norm: Tensor  # [hidden]
    qkv: Matrix  # [(heads + 2 kv_heads) head_dim, hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Matrix  # [hidden, heads head_dim]
    attention_norm: Tensor | None  # [hidden], of the attention's output
    mlp_norm: Tensor  # [hidden], of the MLP's input
    gate_up: Matrix  # [2 ffn, hidden]
    down: Matrix  # [hidden, ffn]
    output_norm: Tensor | None  # [hidden], of the MLP's output


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Matrix  # [vocab, hidden]; where tied, of the embedding's values


def load_weights(folder: Path, spec: ModelSpec, dtype: torch.dtype) -> Weights:
    """Read all tensors that `spec` needs, converted to `dtype`.

    Raises ModelError naming file, tensor and expected shape for a missing shard, a missing
    tensor, a wrong shape or kind of number, and values that are not finite.
    """
    with ExitStack() as stack:
        reader = _Reader(folder, dtype, stack)
        base, shape = spec.tensor_prefix, (spec.vocab_size, spec.hidden_size)
        embedding = reader.read(f"{base}embed_tokens.weight", shape)
        head = embedding
        if not spec.tied_embeddings:
            head = reader.read("lm_head.weight", shape)
        return Weights(
            embedding=embedding,
            layers=tuple(_layer(reader, spec, index) for index in range(spec.layers)),
            final_norm=_norm(reader, spec, f"{base}norm.weight", spec.hidden_size),
            head=Matrix(head),
        )


def source_dtype(folder: Path) -> torch.dtype:
    """The kind of number that the embedding is stored in. Raises ModelError."""
    with ExitStack() as stack:
        return _Reader(folder, torch.float32, stack).stored_dtype("model.embed_tokens.weight")


def shard_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model, in order of name. Raises ModelError if one is missing."""
    return tuple(sorted(set(_locate(folder).values()))) or (folder / SINGLE_FILE,)


def _layer(reader: _Reader, spec: ModelSpec, index: int) -> LayerWeights:
    base = f"{spec.tensor_prefix}layers.{index}."
    hidden, ffn = spec.hidden_size, spec.ffn_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def norm(name: str, size: int = hidden) -> Tensor:
        return _norm(reader, spec, f"{base}{name}.weight", size)

    def matrix(names: tuple[str, ...], rows: tuple[int, ...], width: int, bias: bool) -> Matrix:
        parts = [(f"{base}{name}", count) for name, count in zip(names, rows, strict=True)]
        weight = reader.fuse([(f"{name}.weight", (count, width)) for name, count in parts])
        if not bias:
            return Matrix(weight)
        return Matrix(weight, reader.fuse([(f"{name}.bias", (count,)) for name, count in parts]))

    parts = ("qkv",) if spec.fused_tensors else ("q", "k", "v")
    qkv = tuple(f"self_attn.{part}_proj" for part in parts)
    qkv_rows = (queries + 2 * keys,) if spec.fused_tensors else (queries, keys, keys)
    gate_up = ("mlp.gate_up_proj",) if spec.fused_tensors else ("mlp.gate_proj", "mlp.up_proj")
    gate_up_rows = (2 * ffn,) if spec.fused_tensors else (ffn, ffn)
    after = "post_attention_layernorm"
    return LayerWeights(
        input_norm=norm("input_layernorm"),
        qkv=matrix(qkv, qkv_rows, hidden, spec.qkv_bias),
        q_norm=norm("self_attn.q_norm", spec.head_dim) if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm", spec.head_dim) if spec.qk_norm else None,
        output=matrix(("self_attn.o_proj",), (hidden,), queries, spec.output_bias),
        attention_norm=norm(after) if spec.output_norms else None,
        mlp_norm=norm("pre_feedforward_layernorm" if spec.output_norms else after),
        gate_up=matrix(gate_up, gate_up_rows, hidden, spec.mlp_bias),
        down=matrix(("mlp.down_proj",), (hidden,), ffn, spec.mlp_bias),
        output_norm=norm("post_feedforward_layernorm") if spec.output_norms else None,
    )


def _norm(reader: _Reader, spec: ModelSpec, name: str, size: int) -> Tensor:
    weight = reader.read(name, (size,))
    return weight.to(torch.float32) + 1.0 if spec.norm_adds_one else weight


class _Reader:
    """Open shards and the place of every tensor. The files close with `stack`."""

    def __init__(self, folder: Path, dtype: torch.dtype, stack: ExitStack) -> None:
        self._dtype = dtype
        self._files: dict[Path, Any] = {}
        self._folder = folder
        self._places: dict[str, Path] = {}
        for path in shard_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path}: not a readable safetensors file: {error}; download it again"
                ) from error
            self._files[path] = file
            self._places.update(dict.fromkeys(file.keys(), path))

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, copied."""
        target = self._room(shape)
        self._fill(target, name)
        return target

    def _room(self, shape: tuple[int, ...]) -> Tensor:
        try:
            return torch.empty(shape, dtype=self._dtype)
        except (RuntimeError, TypeError, OverflowError) as error:  # by kind of impossible size
            raise ModelError(
                f"{self._folder}: the system has no memory for a tensor {list(shape)}: check the "
                "sizes in config.json, or use a machine with more memory"
            ) from error

    def fuse(self, parts: list[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Several tensors, joined along their first axis."""
        rows = sum(shape[0] for _, shape in parts)
        target = self._room((rows, *parts[0][1][1:]))
        start = 0
        for name, shape in parts:
            self._fill(target[start : start + shape[0]], name)
            start += shape[0]
        return target

    def stored_dtype(self, name: str) -> torch.dtype:
        kind = self._file(name).get_slice(name).get_dtype()
        if kind not in _SOURCE_DTYPES:
            known = ", ".join(_SOURCE_DTYPES)
            raise ModelError(
                f"{self._places[name]}: tensor {name} is of kind {kind}; use a version of the "
                f"model stored as {known}"
            )
        return _SOURCE_DTYPES[kind]

    def _file(self, name: str) -> Any:
        if name not in self._places:
            raise ModelError(
                f"{self._folder}: tensor {name} is in none of its {len(self._files)} safetensors "
                "files; config.json does not fit the weights, or a download is not complete"
            )
        return self._files[self._places[name]]

    def _fill(self, target: Tensor, name: str) -> None:
        self.stored_dtype(name)
        path, file = self._places.get(name), self._file(name)
        shape = tuple(file.get_slice(name).get_shape())
        if shape != tuple(target.shape):
            raise ModelError(
                f"{path}: tensor {name} has shape {list(shape)}, but config.json asks for "
                f"{list(target.shape)}"
            )
        target.copy_(file.get_tensor(name))
        # A sum is not finite if any term is not; the exact check runs only when it is not.
        if not target.sum(dtype=torch.float32).isfinite() and not target.isfinite().all():
            raise ModelError(
                f"{path}: tensor {name} {list(shape)} has values that are not finite in "
                f"{str(self._dtype).removeprefix('torch.')}; download it again, or use float32"
            )


def _locate(folder: Path) -> dict[str, Path]:
    """Tensor name to file by the index; empty where there is none. All files exist."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise ModelError(
                f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors "
                "weights are read"
            )
        return {}
    fields = read_fields(index).section("weight_map")
    places = {name: folder / _file_name(index, file) for name, file in fields.values.items()}
    if not places:
        raise ModelError(f"{index}: weight_map: is empty; download the file again")
    for path in sorted(set(places.values())):
        if not path.exists():
            held = next(name for name, place in places.items() if place == path)
            raise ModelError(
                f"{path}: missing shard, named by {INDEX_FILE} (it holds {held}); download it"
            )
    return places


def _file_name(index: Path, name: object) -> str:
    """A plain file name: an index may not point out of its folder."""
    if not isinstance(name, str) or Path(name).name != name:
        raise ModelError(f"{index}: weight_map: {json.dumps(name)} is not a plain file name")
    return name
