"""Products with a bfloat16 matrix that is packed for the processor's vectors. Needs numba.

    [out / 64, in / 2, 64, 2]: panels of 64 outputs, two adjacent inputs side by side

With few rows, oneDNN's kernels do not use the full memory bandwidth; with many, these are about as
fast. They are not used on processors with AMX, nor with AVX-512 but no BF16. oneDNN's sums on AMX
depend on the number of rows and of threads, so the deterministic mode uses these there too. With
AVX2 alone, oneDNN has no kernel, and torch's product is a loop over single numbers. Threads share
the panels, and prefetch the next panel while they multiply one. A row's result does not depend on
other rows, bit for bit. Values are immutable.
"""

from __future__ import annotations

import numba
import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.cpu.compiled import compiled, take_threads
from baton.engine.cpu.dot_bf16 import COLUMNS, has_matrix_unit, native, supported
from baton.engine.cpu.tile_bf16 import MAX_ROWS, tile
from baton.engine.memory.huge_pages import zeros
from baton.engine.model.linear import bfloat16_is_fast

_BLOCK_ROWS = 1024  # whose inputs stay in the last-level cache for all panels
_AHEAD = 2048  # bytes; 2 to 4 KiB were equally fast
_FETCHING = 4  # tiles that prefetch one line per pair each; a panel has four lines per pair


class Panels:
    """A packed copy of `weight` bfloat16 [out, in], with an optional `bias` [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, inputs = weight.shape
        self._pairs = inputs // 2
        self._padded = -(-self.outputs // COLUMNS) * COLUMNS
        whole = functional.pad(weight, (0, 0, 0, self._padded - self.outputs))
        panels = whole.view(-1, COLUMNS, self._pairs, 2).transpose(1, 2)
        self._panels = zeros(tuple(panels.shape), weight.dtype).copy_(panels)
        self._start = torch.zeros(self._padded)
        if bias is not None:
            self._start[: self.outputs] = bias
        multiply(0, 0, 0, 0, 0, self._pairs, 0, 0)  # compiles before serving

    @property
    def addresses(self) -> tuple[int, int]:
        """Return the addresses of the panels and of the bias, valid while this object lives."""
        return self._panels.data_ptr(), self._start.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply bfloat16 `x` [rows, in]; returns [rows, out], each sum rounded once. Raises
        ValueError for another dtype or width, since the kernel reads addresses."""
        if x.dtype != torch.bfloat16 or x.shape[1] != 2 * self._pairs:
            raise ValueError(
                f"{x.dtype} [.., {x.shape[1]}] cannot be multiplied by a bfloat16 matrix "
                f"[.., {2 * self._pairs}]"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, stride = x.shape[0], 2 * x.stride(0)
        out = torch.empty(rows, self._padded, dtype=torch.bfloat16)
        take_threads()
        for first in range(0, rows, _BLOCK_ROWS):
            multiply(
                min(_BLOCK_ROWS, rows - first),
                x.data_ptr() + first * stride,
                stride,
                self._panels.data_ptr(),
                self._padded // COLUMNS,
                self._pairs,
                self._start.data_ptr(),
                out.data_ptr() + first * 2 * self._padded,
            )
        return out[:, : self.outputs].contiguous()


def can_pack(weight: Tensor, *, batch_invariant: bool = False) -> bool:
    """Return whether `Panels` supports this matrix on this processor. `batch_invariant`: even if
    a product whose rows depend on each other is faster."""
    outputs, inputs = weight.shape
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return False
    if inputs % 2 or not supported():
        return False
    if has_matrix_unit():
        return batch_invariant
    if native():
        return outputs % COLUMNS == 0  # oneDNN multiplies the others
    return not bfloat16_is_fast()


def _times_panel(  # type: ignore[no-untyped-def] # numba infers types
    rows,
    x,  # address of bfloat16 [rows, 2 * pairs]
    x_stride,  # bytes
    panel,  # address
    pairs,
    start,  # address of float32 [64]
    out,  # address of bfloat16 [rows, 64]
    out_stride,  # bytes
):
    """Multiply rows by the 64 outputs of one panel."""
    tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
    if tiles == 1:  # bound by memory: prefetch everything shortly ahead
        _all_ahead(rows, x, x_stride, panel, panel + _AHEAD, pairs, start, out, out_stride)
        return
    ahead = panel + 4 * COLUMNS * pairs
    row = 0
    for number in range(tiles):  # some prefetch a part of the next panel
        count = (rows - row + tiles - number - 1) // (tiles - number)
        at, to = x + row * x_stride, out + row * out_stride
        if tiles < _FETCHING:
            _half_ahead(count, at, x_stride, panel, ahead, pairs, start, to, out_stride)
            ahead += 2 * 64 * pairs
        elif number < _FETCHING:
            _part_ahead(count, at, x_stride, panel, ahead, pairs, start, to, out_stride)
            ahead += 64 * pairs
        else:
            _none_ahead(count, at, x_stride, panel, ahead, pairs, start, to, out_stride)
        row += count


def multiply_walk(  # type: ignore[no-untyped-def] # numba infers types
    rows,
    x,  # address of bfloat16 [rows, 2 * pairs]
    x_stride,  # bytes
    weight,  # address
    panels,
    pairs,
    start,  # address of float32 [64 * panels]
    out,  # address of bfloat16 [rows, 64 * panels]
):
    for index in numba.prange(panels):
        panel, first = weight + index * 4 * COLUMNS * pairs, start + 4 * COLUMNS * index
        target, stride = out + 2 * COLUMNS * index, 2 * COLUMNS * panels
        times_panel(rows, x, x_stride, panel, pairs, first, target, stride)


_all_ahead, _half_ahead, _part_ahead, _none_ahead = tile(4), tile(2), tile(1), tile(0)
times_panel = compiled(_times_panel)
multiply = compiled(multiply_walk, parallel=True)
