"""All layers of a decode step in one compiled call. Needs numba.

    for each layer:  product with qkv, norms, rotation, KV into the pool     a head at a time
                     attention                                              a row and KV head
                     output product; residual sum and norm
                     product with gate and up, SiLU                          64 outputs at a time
                     product with down; residual sum and norm

The kernels are those of `linear_numba`, `row_ir` and `decode_bf16`, so a row has the same bits as
in the decoder's layer-by-layer computation. The pass saves Python code, thread wake-ups and passes
over memory. It only supports the usual layers of a bfloat16 model (see `decode_pass`). Over ranks,
each residual sum follows a sum over the ranks in the same call. It holds the weights and their
addresses; everything else lives for one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.cpu.allreduce_numba import TILE, exchange_bfloat16
from baton.engine.cpu.compiled import compiled, inner, take_threads
from baton.engine.cpu.decode_bf16 import attend_all, new_scratch
from baton.engine.cpu.dot_bf16 import COLUMNS, LANES
from baton.engine.cpu.linear import CpuMatrix
from baton.engine.cpu.linear_numba import Panels, multiply, times_panel
from baton.engine.cpu.rotation_bf16 import rotate_head
from baton.engine.cpu.row_ir import copy_row, gate_row, scale, squares
from baton.engine.cpu.row_kernels import add_norm_rows, norm_factor
from baton.engine.model.linear import Linear
from baton.engine.model.step_layout import StepLayout
from baton.engine.model.weights import LayerWeights, MlpWeights, Weights
from baton.engine.spec.model_spec import ModelSpec

_MAX_ROWS = 1024  # of a step; more need the decoder's product in blocks
_ROTATED_AT_ONCE = 2 * LANES  # numbers


@dataclass(frozen=True, slots=True)
class RankRounds:
    """The arguments of compiled rounds of bfloat16 sums over ranks (`allreduce_numba`)."""

    flags: NDArray[np.int64]
    buffers: NDArray[np.uint16]  # [2, ranks, numbers]
    rank: int
    scratch: NDArray[np.float32]  # [2, TILE]


class RankSums(Protocol):
    """The sums over the ranks of a worker, in which a pass takes part."""

    @property
    def rounds(self) -> RankRounds: ...

    def take_rounds(self, count: int, run: Callable[[int], tuple[int, int]]) -> None:
        """Call `run` with the number of the first of `count` rounds until it has run all. It
        returns 1 + the number of a missing rank, or 0, and how many rounds it has run. Raises
        DeviceLost if a rank does not take part in a round in time."""
        ...


def _no_rounds() -> RankRounds:
    buffers, scratch = np.zeros((2, 1, 1), np.uint16), np.zeros((2, TILE), np.float32)
    return RankRounds(np.zeros(1, np.int64), buffers, 0, scratch)


class DecodePass:
    """The pass over all layers. One thread at a time may call it."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, pool: Tensor, sums: RankSums | None = None
    ) -> None:
        """Connect the weights and `pool` [block, kv_head, layer, k|v, token, dim]. `sums`: over
        the ranks of a worker, for a rank's share of its model."""
        self._spec = spec
        self._sums = sums
        self._alone = _no_rounds()
        self._pool = pool
        self._strides = tuple(2 * stride for stride in pool.stride()[:5])
        self._kept: list[object] = [weights]  # the table has their addresses
        layers = weights.layers
        after = [layer.input_norm for layer in layers[1:]] + [weights.final_norm]
        rows = [
            self._row(*each) for each in zip(layers, after, spec.attention.windows, strict=True)
        ]
        self._table = np.array(rows, dtype=np.int64)  # [layers, 14]

    def _row(self, layer: LayerWeights, after: Tensor, window: int) -> list[int]:
        """Return a layer's row of the table, which `_through` describes."""
        assert isinstance(layer.mlp, MlpWeights)
        found: list[int] = []
        for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
            panels = _panels(linear)
            assert panels is not None
            found += panels.addresses
        for norm in (layer.q_norm, layer.k_norm, layer.mlp_norm, after):
            wide = None if norm is None else norm.to(torch.float32).contiguous()
            self._kept.append(wide)
            found.append(0 if wide is None else wide.data_ptr())
        return [*found, window, int(self._spec.local_rope is not None and window > 0)]

    def takes(self, layout: StepLayout, angles: Tensor) -> bool:
        """Return whether a step has only decode rows, and a size and rotation that the kernels
        support."""
        rows = layout.decode_rows
        if self._sums is not None:
            in_one_round = self._sums.rounds.buffers.shape[2] // self._spec.hidden_size
            if rows > in_one_round:
                return False
        return not layout.chunks and rows <= _MAX_ROWS and angles.shape[-1] % _ROTATED_AT_ONCE == 0

    def __call__(
        self,
        x: Tensor,  # bfloat16 [rows, hidden], contiguous; overwritten
        normed: Tensor,  # `x` after the first layer's norm
        angles: tuple[Tensor, Tensor],
        local: tuple[Tensor, Tensor],  # of layers with a window
        layout: StepLayout,
    ) -> Tensor:
        """Return final hidden states [rows, hidden], normalised; writes the rows' KV. Raises
        DeviceLost like `RankSums`."""
        return self._run(x, normed, angles, local, layout, self._sums)

    def _run(
        self,
        x: Tensor,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        local: tuple[Tensor, Tensor],
        layout: StepLayout,
        sums: RankSums | None,
    ) -> Tensor:
        spec, rows = self._spec, x.shape[0]
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and normed.is_contiguous()
        turns = [each.contiguous() for each in (*angles, *local)]  # [rows, 1, turned]
        assert all(each.dtype == torch.bfloat16 for each in turns)
        widths = [(heads + 2 * kv_heads) * dim, heads * dim, heads * dim, spec.hidden_size]
        widths += [2 * spec.ffn_size, spec.ffn_size, spec.hidden_size]
        made = [torch.empty(rows, width, dtype=x.dtype) for width in widths]
        take_threads()
        size = self._pool.shape[4]
        tokens = layout.decode_tables.shape[1] * size
        shared = new_scratch(numba.get_num_threads(), heads // kv_heads, dim, tokens)
        rounds = self._alone if sums is None else sums.rounds
        part = made[3].view(torch.uint16).view(-1).numpy()
        summed = np.zeros(2, np.int64)
        given = (
            self._table,
            (rows, spec.hidden_size, heads, kv_heads, dim, spec.ffn_size),
            (spec.norm_eps, np.float32(spec.attention.scale), np.float32(spec.attention.soft_cap)),
            (self._pool.data_ptr(), size),
            self._strides,
            tuple(each.data_ptr() for each in turns),
            angles[0].shape[-1],
            layout.write_blocks.numpy(),
            layout.write_slots.numpy(),
            layout.decode_tables.numpy(),
            layout.decode_lengths.numpy(),
            (shared.tiles, shared.weights, shared.mixed),
            tuple(each.data_ptr() for each in (x, normed, *made)),
        )

        def run(first: int) -> tuple[int, int]:
            vectors = part, rounds.flags, rounds.buffers, rounds.rank, first, rounds.scratch
            missing = through_layers(*given, vectors, summed)
            return int(missing), int(summed[0])

        if sums is None:
            run(0)
        else:
            sums.take_rounds(2 * len(self._table), run)
        return made[-1]

    def warm_up(self) -> None:
        """Compile before serving, with a batch of no rows."""
        none = torch.zeros(0, dtype=torch.int64)
        table, length = torch.zeros(0, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        layout = StepLayout(none, none, none, none, table, length, (), ())
        x = torch.zeros(0, self._spec.hidden_size, dtype=torch.bfloat16)
        turn = torch.zeros(0, 1, self._spec.rotary_dim, dtype=torch.bfloat16)
        self._run(x, x, (turn, turn), (turn, turn), layout, None)


def decode_pass(
    spec: ModelSpec, weights: Weights, pool: Tensor, sums: RankSums | None = None
) -> DecodePass | None:
    """Return the pass for a pool that the bfloat16 kernels support. None if a layer is not
    supported (a mixture, an output norm, another gate than SiLU) or a matrix is not packed."""
    plain = spec.latent is None and spec.activation == "silu" and spec.ffn_size % COLUMNS == 0
    if not plain or not all(_is_plain(layer) for layer in weights.layers):
        return None
    made = DecodePass(spec, weights, pool, sums)
    made.warm_up()
    return made


def _is_plain(layer: LayerWeights) -> bool:
    if not isinstance(layer.mlp, MlpWeights) or (layer.q_norm is None) != (layer.k_norm is None):
        return False
    if layer.attention_norm is not None or layer.output_norm is not None:
        return False
    linears = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    packed = [_panels(linear) for linear in linears]
    return all(panels is not None and panels.outputs % COLUMNS == 0 for panels in packed)


def _panels(linear: Any) -> Panels | None:
    product: Linear | None = linear.product if isinstance(linear, CpuMatrix) else None
    return product if isinstance(product, Panels) else None


def _project_heads(  # type: ignore[no-untyped-def] # numba infers types
    sizes, normed, matrix, norms, eps, pool, strides, angles, blocks, slots, qkv, queries
):
    """Compute queries, keys and values of all rows (products, norms, rotation); write the KV."""
    rows, hidden, heads, kv_heads, dim, _ = sizes
    units = heads + 2 * kv_heads
    stride, vectors, panel_bytes = units * dim * 2, dim // LANES, 2 * COLUMNS * hidden
    for unit in numba.prange(units):
        for number in range(unit * dim // COLUMNS, (unit + 1) * dim // COLUMNS):
            panel, start = matrix[0] + number * panel_bytes, matrix[1] + number * COLUMNS * 4
            to = qkv + number * COLUMNS * 2
            times_panel(rows, normed, hidden * 2, panel, hidden // 2, start, to, stride)
        norm = norms[0] if unit < heads else norms[1]
        for row in range(rows):
            at = qkv + row * stride + unit * dim * 2
            if unit >= heads + kv_heads:
                head = unit - heads - kv_heads
                token = pool + blocks[row] * strides[0] + slots[row] * strides[4]
                copy_row(at, token + head * strides[1] + strides[3], vectors)
                continue
            if norm:
                scale(at, norm, at, vectors, norm_factor(squares(at, vectors), dim, eps))
            if unit < heads:
                rotate_head(at, row, angles, queries + (row * heads + unit) * dim * 2)
            else:
                token = pool + blocks[row] * strides[0] + slots[row] * strides[4]
                rotate_head(at, row, angles, token + (unit - heads) * strides[1])


def _gate_up(rows, hidden, ffn, normed, matrix, both, gated):  # type: ignore[no-untyped-def] # numba infers types
    """Write silu(gate) * up of all rows into `gated` [rows, ffn]; `both` [rows, 2 ffn] is
    scratch."""
    panel_bytes, panels = 2 * COLUMNS * hidden, ffn // COLUMNS
    for index in numba.prange(panels):
        for half in range(2):
            number = index + half * panels
            panel, start = matrix[0] + number * panel_bytes, matrix[1] + number * COLUMNS * 4
            to = both + number * COLUMNS * 2
            times_panel(rows, normed, hidden * 2, panel, hidden // 2, start, to, 4 * ffn)
        for row in range(rows):
            at, to = both + row * 4 * ffn + index * COLUMNS * 2, gated + row * 2 * ffn
            gate_row(at, at + 2 * ffn, to + index * COLUMNS * 2, COLUMNS // LANES)


def _through(  # type: ignore[no-untyped-def] # numba infers types
    table,  # int64 [layers, 14]: addresses of four matrices and of their biases, of four norms'
    #         weights (0: none), then the window and whether the second pair of `turns` is used
    sizes,  # rows, hidden, heads, kv_heads, dim, ffn
    constants,  # eps; scale and soft cap of scores
    pool,  # address, tokens of a block
    strides,  # bytes: of a block, KV head, layer, k to v, token
    turns,  # addresses of bfloat16 [rows, turned]: cos and sin, then those of local layers
    turned,
    blocks,  # int64 [rows]
    slots,
    tables,  # int32 [rows, width]
    lengths,  # int32 [rows]
    shared,  # the arrays of a `DecodeScratch`
    made,  # addresses of bfloat16 [rows, ..]: x, normed, qkv, queries, attended, part, gate and
    #        up, gated, and the result
    vectors,  # `part` as uint16 [rows * hidden], then what sums it over ranks: flags, buffers, the
    #           own rank, the first round, scratch
    summed,  # int64 [2]: sums of `part` that are complete, two for each layer; 1 if this rank has
    #          published its part of the next
):
    """Run all layers; an earlier call that returned a missing rank is continued. Returns 0, or 1 +
    the number of a missing rank."""
    rows, hidden, heads, kv_heads, dim, ffn = sizes
    eps, factor, soft_cap = constants
    x, normed, qkv, queries, attended, part, both, gated, result = made
    by_block, by_head, by_layer, by_pair, by_token = strides
    for layer in range(summed[0] // 2, table.shape[0]):
        at = table[layer]
        here = pool[0] + layer * by_layer
        cos, sin = (turns[2], turns[3]) if at[13] else (turns[0], turns[1])
        source = normed if layer == 0 else result
        given = (sizes, source, (at[0], at[1]), (at[8], at[9]), eps)
        turn = (cos, sin, turned, dim)
        outputs = hidden // COLUMNS
        stride = 2 * hidden
        if summed[0] == 2 * layer:
            if not summed[1]:
                _heads(*given, here, strides, turn, blocks, slots, qkv, queries)
                layer_pool = (here, (by_block, by_head, by_pair, by_token), kv_heads, pool[1], dim)
                jobs = (tables, lengths, at[12], factor, soft_cap)
                attend_all(*layer_pool, queries, heads, *jobs, *shared, attended)
                width = heads * dim
                multiply(rows, attended, 2 * width, at[2], outputs, width // 2, at[3], part)
            missing = _sum_over_ranks(*vectors, summed)
            if missing:
                return missing
            add_norm_rows(0, rows, part, stride, x, stride, hidden, at[10], eps, result, x)
        if not summed[1]:
            _gated(rows, hidden, ffn, result, (at[4], at[5]), both, gated)
            multiply(rows, gated, 2 * ffn, at[6], outputs, ffn // 2, at[7], part)
        missing = _sum_over_ranks(*vectors, summed)
        if missing:
            return missing
        add_norm_rows(0, rows, part, stride, x, stride, hidden, at[11], eps, result, x)
    return 0


@inner
def _sum_over_ranks(vector, flags, buffers, rank, first, scratch, summed):  # type: ignore[no-untyped-def] # numba infers types
    """Replace `vector` by its sum over the ranks, of which there may be one. Returns 0, or 1 + the
    number of a missing rank."""
    if buffers.shape[1] > 1:
        posted = summed[1] != 0
        missing = exchange_bfloat16(
            vector, flags, buffers, rank, first + summed[0], posted, scratch
        )
        if missing:
            summed[1] = 1
            return missing
    summed[0] += 1
    summed[1] = 0
    return 0


_heads = compiled(_project_heads, parallel=True)
_gated = compiled(_gate_up, parallel=True)
through_layers = compiled(_through)
