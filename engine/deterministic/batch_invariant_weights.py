"""Replaces a GPU's products by batch-invariant ones, whose rows do not depend on other rows.

The deterministic mode uses the same matrices with tiles that do not depend on the number of rows.
The module copies no weights and keeps no state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.engine.deterministic.linear_invariant import replaced
from baton.engine.model.linear import JoinedMatrix, PlainMatrix
from baton.engine.triton.linear import FixedTileLinear
from baton.engine.triton.matrices import StackedExperts
from baton.engine.triton.quantized import TritonQuantized
from baton.runtime.errors import ModelError

_TILE_ROWS = 64  # of an expert's rows


def with_invariant_products(weights: Any) -> Any:
    """Return the dataclass `weights` with a batch-invariant product for every matrix, at any
    depth. Raises ModelError for a matrix that has none."""
    return replaced(weights, _invariant)


def _invariant(part: Any) -> Any:
    if isinstance(part, PlainMatrix):
        return FixedTileLinear(part.weight, part.bias)
    if isinstance(part, TritonQuantized):
        return part.batch_invariant()
    if isinstance(part, JoinedMatrix):
        return JoinedMatrix([_invariant(matrix) for matrix in part.parts])
    if isinstance(part, StackedExperts):
        return replace(part, tile_rows=_TILE_ROWS)
    if callable(part):
        raise ModelError(
            f"worker.deterministic: {type(part).__name__} has no batch-invariant product on a GPU; "
            "set worker.device to cpu, or serve without the setting"
        )
    return part
