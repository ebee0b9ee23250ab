"""From stored tensors to the matrices and vectors of a decoder.

A matrix is asked for by the names of the modules that it is made of, from top to bottom: one
name where the checkpoint has it whole, several where it is fused here. How a module is stored
is this file's matter, not the caller's. Threads may read different matrices at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.linear import Linear, Matrix
from baton.engine.shards import KINDS, Shards
from baton.runtime.errors import ModelError

Parts = Sequence[tuple[str, int]]  # (module, "model.layers.0.mlp.up_proj", its rows)
_FLOATS = ("F32", "F16", "BF16")


class WeightReader:
    """Reads what a spec asks for, converted to `dtype`. All methods raise ModelError naming
    file, tensor and expected shape for what is missing, of another shape or kind, or not
    finite."""

    def __init__(self, shards: Shards, dtype: torch.dtype) -> None:
        self._shards = shards
        self._dtype = dtype

    def as_kind(self, dtype: torch.dtype) -> WeightReader:
        """The same files, converted to `dtype`."""
        return WeightReader(self._shards, dtype)

    def vector(self, name: str, size: int) -> Tensor:
        """`name` is the tensor's own: "model.norm.weight". Returns [size]."""
        return self._joined([(name, size)], ())

    def table(self, name: str, rows: int, columns: int) -> Tensor:
        """A tensor that is looked up, not multiplied with: [rows, columns]."""
        return self._joined([(name, rows)], (columns,))

    def matrix(self, parts: Parts, columns: int, *, bias: bool = False) -> Linear:
        """The product with the modules' weights [sum of rows, columns], and their biases."""
        joined = None
        if bias:
            joined = self._joined([(f"{name}.bias", rows) for name, rows in parts], ())
        return Matrix(self.dense(parts, columns), joined)

    def dense(self, parts: Parts, columns: int) -> Tensor:
        """The modules' weights as plain numbers [sum of rows, columns], for whoever does more
        with them than multiply."""
        return self._joined([(f"{name}.weight", rows) for name, rows in parts], (columns,))

    def _joined(self, tensors: Parts, rest: tuple[int, ...]) -> Tensor:
        """Tensors [rows, *rest], one below the other, copied."""
        target = self._room((sum(rows for _, rows in tensors), *rest))
        start = 0
        for name, rows in tensors:
            self._fill(target[start : start + rows], name)
            start += rows
        return target

    def _room(self, shape: tuple[int, ...]) -> Tensor:
        try:
            return torch.empty(shape, dtype=self._dtype)
        except (RuntimeError, TypeError, OverflowError) as error:  # by kind of impossible size
            raise ModelError(
                f"{self._shards.folder}: the system has no memory for a tensor {list(shape)}: "
                "check the sizes in config.json, or use a machine with more memory"
            ) from error

    def _fill(self, target: Tensor, name: str) -> None:
        stored = self._shards.find(name)
        float_dtype(self._shards, name)
        if stored.shape != tuple(target.shape):
            raise ModelError(
                f"{stored.path}: tensor {name} has shape {list(stored.shape)}, but config.json "
                f"asks for {list(target.shape)}"
            )
        with self._shards.open(name) as source:
            target.copy_(source)
        # A sum is not finite if any term is not; the exact check runs only when it is not.
        if not target.sum(dtype=torch.float32).isfinite() and not target.isfinite().all():
            raise stored.error(
                "has values that are not finite in "
                f"{str(self._dtype).removeprefix('torch.')}; download it again, or use float32"
            )


def float_dtype(shards: Shards, name: str) -> torch.dtype:
    """The kind of number of a tensor that is stored plainly. Raises ModelError."""
    stored = shards.find(name)
    if stored.kind not in _FLOATS:
        raise stored.error(
            f"is of kind {stored.kind}; use a version of the model stored as {', '.join(_FLOATS)}"
        )
    return KINDS[stored.kind]
