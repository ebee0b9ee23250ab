"""Multiplication by a weight matrix that is packed once for the CPU's matrix kernels.

The compiled kernel multiplies bfloat16 if the processor has vectors for it.
oneDNN packs what else it can: with few rows (decode), it reads a packed matrix 1.5 to 2 times as
fast as an unpacked one. torch multiplies the rest. Values are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.cpu.linear_quantized import QuantizedMatrix
from baton.engine.model.experts import ListedExperts
from baton.engine.model.linear import Linear, PlainMatrix, bfloat16_is_fast
from baton.engine.model.matrix_backend import ExpertSource
from baton.engine.model.quantized_weight import QuantizedWeight

_PACKED_ROWS = 32  # rows for which oneDNN packs


@dataclass(frozen=True, slots=True)
class CpuMatrices:
    """The factory of products with weights in host memory."""

    batch_invariant: bool = False  # see `CpuMatrix`
    compiled: bool = True  # by numba, which is installed

    @property
    def device(self) -> None:
        return None

    def plain(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return CpuMatrix(weight, bias, batch_invariant=self.batch_invariant, compiled=self.compiled)

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        return QuantizedMatrix(weight, bias, dtype, compiled=self.compiled)

    def experts(self, source: ExpertSource) -> ListedExperts:
        return source.listed()


class CpuMatrix:
    """The product with `weight` [out, in] and an optional `bias` [out]. It keeps no unpacked copy
    of a packed weight."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        batch_invariant: bool = False,
        compiled: bool = True,
    ) -> None:
        """Pack the weight. `batch_invariant`: prefer a kernel whose rows do not depend on each
        other to a faster one whose rows do (oneDNN's on AMX), if there is one. `compiled`: use
        numba, which has to be installed, if it has a kernel."""
        panels = compiled_linear(weight, bias, batch_invariant) if compiled else None
        self.product = panels or _packed(weight, bias) or PlainMatrix(weight, bias)

    @property
    def parts(self) -> list[Linear]:
        return [self.product]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, in]; returns [rows, out]. In measurements, a row's result does not
        depend on other rows in the compiled kernel and in oneDNN's on AVX-512; elsewhere its
        rounding may."""
        return self.product(x)


def compiled_linear(weight: Tensor, bias: Tensor | None, batch_invariant: bool) -> Linear | None:
    """Return the numba kernel of a bfloat16 `weight`; None where it cannot pack it."""
    if weight.dtype != torch.bfloat16:
        return None
    from baton.engine.cpu.linear_numba import Panels, can_pack

    packs = can_pack(weight, batch_invariant=batch_invariant)
    return Panels(weight, bias) if packs else None


def _packed(weight: Tensor, bias: Tensor | None) -> Linear | None:
    if not torch_can_pack(weight):
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)

    def multiply(x: Tensor) -> Tensor:
        rows = len(x)
        if rows == 1 and x.dtype == torch.float32:
            # For one row, oneDNN uses another kernel, which sums in another order.
            return multiply(x.expand(2, -1).contiguous())[:1]
        if more := padded_rows(rows) - rows:
            x = functional.pad(x, (0, 0, 0, more))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out[:rows]

    return multiply


def padded_rows(rows: int) -> int:
    """Return the next number of rows with at most four significant bits, less than an eighth more.
    oneDNN compiles a kernel of half a MB for each number of rows and shape of matrix, and keeps a
    thousand kernels; padding keeps their number small."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def torch_can_pack(weight: Tensor) -> bool:
    """Return whether torch has the packing operators, which its compiler uses but which are not a
    public API."""
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
