"""A batch-invariant product with a weight matrix: a row's bits do not depend on other rows.

Matrix libraries choose a kernel, and with it the order of a sum, by the number of rows. They do
not document which numbers share a kernel, so this module measures it on this machine, once per
kind of product and matrix shape. The product then gets all rows of the step, at least two rows, or
a fixed number of rows, and never more at once than were measured. A `SwitchingLinear` always gets
a fixed number. An `InvariantLinear` only changes by that choice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.cpu.linear import padded_rows
from baton.engine.model.linear import CompositeLinear, Linear, SwitchingLinear, kind_of
from baton.runtime.errors import ConfigError

_TILE_ROWS = 64
_FIXED_TILES = 2  # a tiling of `InvariantLinear.multiply`
# Row counts whose results are compared with those of all rows at once. Libraries change kernels
# at powers of two, at other tile sizes, and between few rows and many. Small counts are repeated,
# because different kernels may agree in most of their rounded results. All counts of a packed
# product up to 576 rows are included, so that its kernels are compiled here and not in a step.
# The largest come first: kernels stay in memory, and then reuse that of larger results.
_PACKED_COUNTS = {padded_rows(rows) for rows in range(34, 577)}
_COUNTS = sorted(
    {*range(1, 34), 65, 97, 127, 129, 255, 257, 511, 513} | _PACKED_COUNTS, reverse=True
)
_REPEATED_ROWS = 32
_MAX_ROWS = 1024  # measured, and thus allowed, at once
_LARGE_MATRIX, _MAX_ROWS_OF_LARGE = 1 << 24, 256  # a large matrix takes long to measure
_SEED = 3


class RowTilings:
    """The batch-invariant tiling of rows that was measured for each kind of product and matrix
    shape of a model."""

    def __init__(self) -> None:
        self._found: dict[tuple[Hashable, int, int, torch.dtype], tuple[int, int]] = {}

    def find(self, linear: InvariantLinear, inputs: int, dtype: torch.dtype) -> tuple[int, int]:
        """Return the tiling, and the maximum of rows that it was measured with. Raises ConfigError
        if no tiling is batch-invariant."""
        if linear.switches_by_rows:
            return _FIXED_TILES, _MAX_ROWS
        x = torch.randn(_MAX_ROWS, inputs, generator=torch.Generator().manual_seed(_SEED)).to(dtype)
        outputs = linear.multiply(0, x[:1]).shape[1]
        key = (kind_of(linear), inputs, outputs, dtype)
        if key not in self._found:
            max_rows = _MAX_ROWS if inputs * outputs <= _LARGE_MATRIX else _MAX_ROWS_OF_LARGE
            self._found[key] = _first_invariant(linear, x[:max_rows]), max_rows
        return self._found[key]


class InvariantLinear:
    """The product with `linear` [out, in] under a batch-invariant tiling of rows."""

    def __init__(self, linear: Linear, tilings: RowTilings) -> None:
        self._linear = linear
        self._tilings = tilings
        self._tiling: tuple[int, int] | None = None

    @property
    def parts(self) -> list[Linear]:
        return [self._linear]

    @property
    def switches_by_rows(self) -> bool:
        return _switches(self._linear)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, in]; returns [rows, out]. The first call may measure, and raises
        ConfigError if no tiling is batch-invariant on this machine."""
        if self._tiling is None:
            self._tiling = self._tilings.find(self, x.shape[1], x.dtype)
        tiling, max_rows = self._tiling
        if len(x) <= max_rows:
            return self.multiply(tiling, x)
        return torch.cat([self.multiply(tiling, part) for part in _split(x, max_rows)])

    def multiply(self, tiling: int, x: Tensor) -> Tensor:
        """Multiply under a tiling. 0: all rows at once; 1: at least two rows; 2: fixed tiles."""
        if tiling == _FIXED_TILES:
            padded = functional.pad(x, (0, 0, 0, -len(x) % _TILE_ROWS))
            return torch.cat([self._linear(tile) for tile in _split(padded, _TILE_ROWS)])[: len(x)]
        if tiling == 1 and len(x) == 1:
            return self._linear(x.expand(2, -1).contiguous())[:1]
        return self._linear(x)


def _switches(linear: Linear) -> bool:
    """Return whether the product, or one that it computes by, may change its kernel by itself."""
    if isinstance(linear, SwitchingLinear) and linear.switches_by_rows:
        return True
    return isinstance(linear, CompositeLinear) and any(map(_switches, linear.parts))


def _first_invariant(linear: InvariantLinear, x: Tensor) -> int:
    for tiling in range(_FIXED_TILES + 1):
        if _is_invariant(linear, tiling, x):
            return tiling
    raise ConfigError(
        f"worker.deterministic: on this machine the rows of a product with {x.shape[1]} inputs "
        f"in {str(x.dtype).removeprefix('torch.')} depend on each other; serve without the setting"
    )


def _is_invariant(linear: InvariantLinear, tiling: int, x: Tensor) -> bool:
    """Return whether any number of rows of `x` yields the bits of all rows at once."""
    expected = linear.multiply(tiling, x)
    for count in (count for count in _COUNTS if count < len(x)):
        rows = x[: max(count, _REPEATED_ROWS)]
        parts = [linear.multiply(tiling, part.contiguous()) for part in _split(rows, count)]
        if not torch.equal(torch.cat(parts), expected[: len(rows)]):
            return False
    return True


def _split(x: Tensor, count: int) -> list[Tensor]:
    """Divide `x` into ranges of `count` rows; the last may be shorter."""
    return [x[first : first + count] for first in range(0, len(x), count)]


def with_invariant_linears(weights: Any, tilings: RowTilings | None = None) -> Any:
    """Return the dataclass `weights` with every `Linear` wrapped, at any depth."""
    known = tilings or RowTilings()
    return replaced(weights, lambda part: InvariantLinear(part, known) if callable(part) else part)


def replaced(weights: Any, change: Callable[[Any], Any]) -> Any:
    """Return the dataclass `weights` with `change` applied to its parts, at any depth. The search
    descends into a part only if `change` returns it unchanged."""
    found = change(weights)
    if found is not weights:
        return found
    if isinstance(weights, tuple):
        return tuple(replaced(part, change) for part in weights)
    if is_dataclass(weights) and not isinstance(weights, type):
        parts = {field.name: getattr(weights, field.name) for field in fields(weights)}
        return replace(weights, **{name: replaced(part, change) for name, part in parts.items()})
    return weights
