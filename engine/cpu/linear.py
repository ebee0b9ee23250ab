"""Multiplication with a weight matrix, packed once for the CPU's matrix kernels.

bfloat16 goes to the compiled kernel where the processor has vectors for it and numba is
installed; what else oneDNN can pack, it reads 1.5 to 2 times as fast as a plain matrix when a
step has few rows (decode); the rest is torch's plain product. Immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.cpu.linear_quantized import QuantizedMatrix
from baton.engine.model.experts import ListedExperts
from baton.engine.model.linear import Linear, PlainMatrix, bfloat16_is_fast
from baton.engine.model.matrix_backend import ExpertSource
from baton.engine.model.quantized_weight import QuantizedWeight

_PACKED_ROWS = 32  # rows per step that oneDNN's packed order is chosen for


@dataclass(frozen=True, slots=True)
class CpuMatrices:
    """Makes products of weights in host memory."""

    batch_invariant: bool = False  # see `CpuMatrix`

    @property
    def device(self) -> None:
        return None

    def plain(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return CpuMatrix(weight, bias, batch_invariant=self.batch_invariant)

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        return QuantizedMatrix(weight, bias, dtype)

    def experts(self, source: ExpertSource) -> ListedExperts:
        return source.listed()


class CpuMatrix:
    """`weight` [out, in] and an optional `bias` [out]. Keeps no plain copy where it packs."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False
    ) -> None:
        """`batch_invariant`: choose a kernel whose rows do not depend on each other over a faster
        one whose rows do (oneDNN's on AMX), where there is such a kernel."""
        compiled = _compiled(weight, bias, batch_invariant)
        self.product = compiled or _packed(weight, bias) or PlainMatrix(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]. Compiled, or with oneDNN on AVX-512, a row's result was
        measured not to depend on the other rows; elsewhere it may, by rounding."""
        return self.product(x)


def _compiled(weight: Tensor, bias: Tensor | None, batch_invariant: bool) -> Linear | None:
    if weight.dtype != torch.bfloat16 or find_spec("numba") is None:
        return None
    from baton.engine.cpu.linear_numba import Panels, can_pack

    packs = can_pack(weight, batch_invariant=batch_invariant)
    return Panels(weight, bias) if packs else None


def _packed(weight: Tensor, bias: Tensor | None) -> Linear | None:
    if not _can_pack(weight):
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)

    def multiply(x: Tensor) -> Tensor:
        rows = len(x)
        if rows == 1 and x.dtype == torch.float32:
            # One row alone takes another kernel, which sums in another order.
            return multiply(x.expand(2, -1).contiguous())[:1]
        if more := padded_rows(rows) - rows:
            x = functional.pad(x, (0, 0, 0, more))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out[:rows]

    return multiply


def padded_rows(rows: int) -> int:
    """The next number of rows with at most four significant bits: under an eighth more. oneDNN
    compiles a kernel for each number of rows that it meets, half a MB for each shape of matrix,
    and keeps a thousand; so it meets few."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def _can_pack(weight: Tensor) -> bool:
    """These operators are torch's own (its compiler emits them), but not a promised API."""
    operators = torch.ops.mkldnn
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not hasattr(operators, "_reorder_linear_weight"):
        return False
    if not hasattr(operators, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bfloat16_is_fast()
    return weight.dtype == torch.float32
