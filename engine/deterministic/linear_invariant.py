"""A product with a weight matrix in which a row's bits do not depend on the other rows.

Matrix libraries choose a kernel, and with it the order of a sum, by the number of rows. Which
numbers share one is not documented, so it is measured here on this machine, once for each
shape of matrix: as many rows as the step has, at least two, or always the same number, and never
more at once than were measured. Holds the matrix that it wraps; immutable but for the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.cpu.linear import padded_rows
from baton.engine.model.linear import Linear
from baton.runtime.errors import ConfigError

_TILE_ROWS = 64
# Numbers of rows that are measured against all at once: kernels were seen to change at powers of
# two, at tiles of other sizes, and between few rows and many. Small counts take part repeatedly:
# kernels that differ may agree in most of their rounded results. All that a packed product is
# ever given up to 576 rows are among them: its kernels are compiled here, and not in a step. The
# largest come first: kernels, which stay, then lie where larger results have lain.
_PACKED_COUNTS = {padded_rows(rows) for rows in range(34, 577)}
_COUNTS = sorted(
    {*range(1, 34), 65, 97, 127, 129, 255, 257, 511, 513} | _PACKED_COUNTS, reverse=True
)
_REPEATED_ROWS = 32
_ROWS = 1024  # the most at once: with more, nothing is known
_LARGE, _ROWS_OF_LARGE = 1 << 24, 256  # numbers of a matrix that takes long to measure
_SEED = 3


class Ways:
    """Which way was found to keep rows apart, by shape of matrix: one for all of a model."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, torch.dtype], tuple[int, int]] = {}

    def find(self, linear: InvariantLinear, inputs: int, dtype: torch.dtype) -> tuple[int, int]:
        """The way, and the most rows that it was measured with. Raises ConfigError if none does."""
        x = torch.randn(_ROWS, inputs, generator=torch.Generator().manual_seed(_SEED)).to(dtype)
        outputs = linear.multiply(0, x[:1]).shape[1]
        shape = (inputs, outputs, dtype)
        if shape not in self._found:
            most = _ROWS if inputs * outputs <= _LARGE else _ROWS_OF_LARGE
            self._found[shape] = _first_way(linear, x[:most]), most
        return self._found[shape]


class InvariantLinear:
    """`linear` [out, in], applied in a way that keeps rows apart."""

    def __init__(self, linear: Linear, ways: Ways) -> None:
        self._linear = linear
        self._ways = ways
        self._way: tuple[int, int] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]. The first call measures; it raises ConfigError if no way
        keeps rows apart on this machine."""
        if self._way is None:
            self._way = self._ways.find(self, x.shape[1], x.dtype)
        way, most = self._way
        if len(x) <= most:
            return self.multiply(way, x)
        return torch.cat([self.multiply(way, part) for part in _split(x, most)])

    def multiply(self, way: int, x: Tensor) -> Tensor:
        """By way 0, the rows as they are; 1, at least two rows; 2, always as many."""
        if way == 2:
            padded = functional.pad(x, (0, 0, 0, -len(x) % _TILE_ROWS))
            return torch.cat([self._linear(tile) for tile in _split(padded, _TILE_ROWS)])[: len(x)]
        if way == 1 and len(x) == 1:
            return self._linear(x.expand(2, -1).contiguous())[:1]
        return self._linear(x)


def _first_way(linear: InvariantLinear, x: Tensor) -> int:
    for way in range(3):
        if _keeps_rows_apart(linear, way, x):
            return way
    raise ConfigError(
        f"worker.deterministic: on this machine the rows of a product with {x.shape[1]} inputs "
        f"in {str(x.dtype).removeprefix('torch.')} depend on each other; serve without the setting"
    )


def _keeps_rows_apart(linear: InvariantLinear, way: int, x: Tensor) -> bool:
    """Whether the rows of `x`, any number of them at a time, give the bits of all at once."""
    expected = linear.multiply(way, x)
    for count in (count for count in _COUNTS if count < len(x)):
        rows = x[: max(count, _REPEATED_ROWS)]
        parts = [linear.multiply(way, part.contiguous()) for part in _split(rows, count)]
        if not torch.equal(torch.cat(parts), expected[: len(rows)]):
            return False
    return True


def _split(x: Tensor, count: int) -> list[Tensor]:
    """Runs of `count` rows; the last may be shorter."""
    return [x[first : first + count] for first in range(0, len(x), count)]


def with_invariant_linears(weights: Any, ways: Ways | None = None) -> Any:
    """`weights`, a dataclass, with every `Linear` in it wrapped, however deep it lies."""
    known = ways or Ways()
    return replaced(weights, lambda part: InvariantLinear(part, known) if callable(part) else part)


def replaced(weights: Any, change: Callable[[Any], Any]) -> Any:
    """`weights`, a dataclass, with `change` of its parts, however deep they lie. Of what `change`
    returns as it is, the parts are looked at."""
    found = change(weights)
    if found is not weights:
        return found
    if isinstance(weights, tuple):
        return tuple(replaced(part, change) for part in weights)
    if is_dataclass(weights) and not isinstance(weights, type):
        parts = {field.name: getattr(weights, field.name) for field in fields(weights)}
        return replace(weights, **{name: replaced(part, change) for name, part in parts.items()})
    return weights
