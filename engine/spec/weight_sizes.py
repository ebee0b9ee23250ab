"""The memory of a model's weights, and the arithmetic of a token, from its spec alone.

    weights    matrices (quantised or not) + embedding + head + norms and biases
    read       what a decode step reads: all of these but an embedding that is not tied, and of a
               mixture the experts that its tokens choose
    active     weights that one token is multiplied with: of a mixture only the chosen experts

The sizes are those of the engine's own form (`quantized_weight.py`), which the reader of weights
fills. For one rank of a tensor-parallel worker, give `rank_split.spec_of_rank`. Pure: no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.engine.spec.model_spec import ModelSpec
from baton.engine.spec.moe_spec import ExpertsSpec, LatentSpec
from baton.engine.spec.quantization_config import LoadQuantization, StoredQuantization

_LOAD_GROUPS = (128, 64, 32)  # of int4 at load; the largest that divides the columns
_SCALE_BYTES, _ZERO_BYTES, _FLOAT32_BYTES = 4, 2, 4


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """The weights of a model or of one rank."""

    bytes: int
    expert_bytes: int  # of `bytes`, the experts that tokens choose between
    table_bytes: int  # of `bytes`, the embedding that a step does not read
    chosen_share: float  # of the experts, by one token
    parameters: int
    active_parameters: int
    pair_flops: float  # of one query-key pair in all layers

    def read_bytes(self, sequences: int) -> float:
        """Return the expected bytes that a decode step of `sequences` reads, if they choose
        experts independently and evenly."""
        unused = self.expert_bytes * (1 - self.chosen_share) ** sequences
        return self.bytes - self.table_bytes - unused


@dataclass(frozen=True, slots=True)
class _Part:
    """`count` matrices [rows, columns] or vectors (`columns` 1)."""

    rows: int
    columns: int
    count: int = 1
    used: int = 1  # of `count`, by one token
    quantized: bool = True
    number_bytes: int = 0  # 0: of the model's dtype


def weight_sizes(
    spec: ModelSpec, dtype_bytes: int, quantization: LoadQuantization = "none"
) -> WeightSizes:
    """Return the sizes of `spec`, whose numbers have `dtype_bytes`. `quantization` applies to
    matrices that are stored unquantised, as at load."""
    found, table = list(_parts(spec)), spec.vocab_size * spec.hidden_size
    sizes = [_part_bytes(part, spec, dtype_bytes, quantization) for part in found]
    experts = sum(size for part, size in zip(found, sizes, strict=True) if part.count > part.used)
    numbers = sum(part.rows * part.columns * part.count for part in found)
    used = sum(part.rows * part.columns * part.used for part in found)
    tables = 1 if spec.tied_embeddings else 2
    return WeightSizes(
        bytes=sum(sizes) + tables * table * dtype_bytes,
        expert_bytes=experts,
        table_bytes=(tables - 1) * table * dtype_bytes,
        chosen_share=spec.experts.chosen / spec.experts.count if spec.experts else 1.0,
        parameters=numbers + tables * table,
        active_parameters=used + table,
        pair_flops=2.0 * spec.layers * spec.heads * _pair_width(spec),
    )


def _pair_width(spec: ModelSpec) -> int:
    """Return the multiplications of a head for one pair: of the score and of the value."""
    if spec.latent is not None:  # absorbed: both are products with the latent
        return spec.latent.width + spec.latent.rank
    return 2 * spec.head_dim


def _parts(spec: ModelSpec) -> Iterator[_Part]:
    """Yield all weights but embedding and head."""
    yield _norm(spec, spec.hidden_size)
    for layer in range(spec.layers):
        yield from _attention(spec)
        if spec.experts is not None and spec.experts.sparse[layer]:
            yield from _experts(spec.experts, spec.hidden_size)
        else:
            yield from _mlp(spec.hidden_size, spec.ffn_size, spec.mlp_bias)


def _attention(spec: ModelSpec) -> Iterator[_Part]:
    hidden = spec.hidden_size
    for _ in range(4 if spec.output_norms else 2):
        yield _norm(spec, hidden)
    if spec.qk_norm:
        yield _norm(spec, spec.head_dim)
        yield _norm(spec, spec.head_dim)
    if spec.latent is not None:
        yield from _latent(spec.latent, spec.heads, hidden)
        yield _Part(hidden, spec.heads * spec.latent.value_dim)
    else:
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        yield _Part(rows, hidden)
        if spec.qkv_bias:
            yield _vector(rows)
        yield _Part(hidden, spec.heads * spec.head_dim)
    if spec.output_bias:
        yield _vector(hidden)


def _latent(spec: LatentSpec, heads: int, hidden: int) -> Iterator[_Part]:
    queries = heads * spec.query_dim
    yield _Part((spec.query_rank or queries) + spec.width, hidden)
    if spec.query_rank is not None:
        yield _vector(spec.query_rank)
        yield _Part(queries, spec.query_rank)
    yield _vector(spec.rank)
    yield _Part(heads * (spec.plain_dim + spec.value_dim), spec.rank, quantized=False)


def _mlp(hidden: int, ffn: int, bias: bool) -> Iterator[_Part]:
    yield _Part(2 * ffn, hidden)
    yield _Part(hidden, ffn)
    if bias:
        yield _vector(2 * ffn)
        yield _vector(hidden)


def _experts(spec: ExpertsSpec, hidden: int) -> Iterator[_Part]:
    yield _Part(spec.count, hidden, quantized=False, number_bytes=_FLOAT32_BYTES)  # the gate
    if spec.correction:
        yield _Part(spec.count, 1, quantized=False, number_bytes=_FLOAT32_BYTES)
    first, end = spec.held or (0, spec.count)
    held = end - first
    yield _Part(2 * spec.ffn_size, hidden, held, min(spec.chosen, held))
    yield _Part(hidden, spec.ffn_size, held, min(spec.chosen, held))
    if spec.shared_ffn_size:
        yield from _mlp(hidden, spec.shared_ffn_size, bias=False)


def _norm(spec: ModelSpec, size: int) -> _Part:
    exact = _FLOAT32_BYTES if spec.norm_adds_one else 0
    return _Part(size, 1, quantized=False, number_bytes=exact)


def _vector(size: int) -> _Part:
    return _Part(size, 1, quantized=False)


def _part_bytes(
    part: _Part, spec: ModelSpec, dtype_bytes: int, quantization: LoadQuantization
) -> int:
    numbers = part.rows * part.columns
    if not part.quantized:
        return part.count * numbers * (part.number_bytes or dtype_bytes)
    if spec.quantization is not None:
        return part.count * _stored_bytes(part, spec.quantization)
    if quantization == "int8":
        return part.count * (numbers + part.rows * _SCALE_BYTES)
    if quantization == "int4":
        group = next((each for each in _LOAD_GROUPS if part.columns % each == 0), part.columns)
        groups = part.rows * (part.columns // group)
        return part.count * (numbers // 2 + groups * (_SCALE_BYTES + _ZERO_BYTES))
    return part.count * numbers * dtype_bytes


def _stored_bytes(part: _Part, form: StoredQuantization) -> int:
    """Return the bytes of a matrix that the checkpoint quantises; modules that it leaves plain are
    larger."""
    groups = part.rows * (-(-part.columns // form.group) if form.group else 1)
    zeros = 0 if form.symmetric else groups * _ZERO_BYTES
    return part.rows * part.columns * form.bits // 8 + groups * _SCALE_BYTES + zeros
