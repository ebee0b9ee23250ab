"""Weights on a device, multiplied so that a row's bits do not depend on the other rows.

For the deterministic mode: the same matrices, with tiles that do not follow the number of rows.
Copies no weights; keeps no state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.engine.deterministic.linear_invariant import replaced
from baton.engine.model.linear import JoinedMatrix, PlainMatrix
from baton.engine.triton.linear import FixedLinear
from baton.engine.triton.matrices import StackedExperts
from baton.engine.triton.quantized import TritonQuantized
from baton.runtime.errors import ModelError

_TILE_ROWS = 64  # of an expert's rows


def with_fixed_products(weights: Any) -> Any:
    """`weights`, a dataclass, with every matrix in it multiplied so, however deep it lies. Raises
    ModelError for a matrix of another kind."""
    return replaced(weights, _fixed)


def _fixed(part: Any) -> Any:
    if isinstance(part, PlainMatrix):
        return FixedLinear(part.weight, part.bias)
    if isinstance(part, TritonQuantized):
        return part.kept_apart()
    if isinstance(part, JoinedMatrix):
        return JoinedMatrix([_fixed(matrix) for matrix in part.parts])
    if isinstance(part, StackedExperts):
        return replace(part, tile_rows=_TILE_ROWS)
    if callable(part):
        raise ModelError(
            f"worker.deterministic: no product of {type(part).__name__} on a GPU keeps rows "
            "apart; set worker.device to cpu, or serve without the setting"
        )
    return part
