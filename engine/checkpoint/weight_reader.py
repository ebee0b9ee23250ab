"""Reads the matrices and vectors of a decoder from stored tensors.

The caller names the modules of a matrix from top to bottom: one name if the checkpoint stores the
matrix whole, several if the engine fuses them. The caller does not need to know how a module is
stored. Threads may read different matrices at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.checkpoint.checkpoint_formats import read_quantized
from baton.engine.checkpoint.shard_headers import StoredTensor
from baton.engine.checkpoint.shards import DTYPES, Shards
from baton.engine.model.linear import JoinedMatrix, Linear
from baton.engine.model.matrix_backend import MatrixBackend
from baton.engine.model.quantized_weight import (
    GROUPS,
    QuantizedWeight,
    group_for,
    joined,
    quantize_int4,
    quantize_int8,
)
from baton.engine.spec.quantization_config import LoadQuantization, StoredQuantization
from baton.runtime.errors import ModelError

Parts = Sequence[tuple[str, int]]  # (module, "model.layers.0.mlp.up_proj", its rows)
_FLOATS = ("F32", "F16", "BF16")


class WeightReader:
    """The reader of one model's tensors, converted to `dtype`. All methods raise ModelError with
    file, tensor and expected shape if a tensor is missing, has another shape or dtype, or is not
    finite."""

    def __init__(
        self,
        shards: Shards,
        dtype: torch.dtype,
        matrices: MatrixBackend,
        form: StoredQuantization | None = None,
        load_quantization: LoadQuantization = "none",
    ) -> None:
        """Set the formats. `form`: the storage format of quantised matrices.
        `load_quantization`: the quantisation at load of matrices that are stored unquantised."""
        self.matrices = matrices
        self._shards = shards
        self._dtype = dtype
        self._form = form
        self._load_quantization = load_quantization

    def quantizes(self, parts: Parts, columns: int) -> bool:
        """Return whether any of the modules' weights is quantised in memory."""
        return any(self._quantized(name, rows, columns) is not None for name, rows in parts)

    def quantized(self, parts: Parts, columns: int) -> QuantizedWeight:
        """Read the modules' weights as one quantised matrix. All must have one format."""
        found = [self._quantized(name, rows, columns) for name, rows in parts]
        weights = [weight for weight in found if weight is not None]
        whole = joined(weights) if weights and len(weights) == len(parts) else None
        if whole is None:
            names = ", ".join(name for name, _ in parts)
            raise ModelError(
                f"{self._shards.folder}: {names} have different quantisation formats, which a GPU "
                "does not support; set worker.device to cpu"
            )
        return whole

    def with_dtype(self, dtype: torch.dtype) -> WeightReader:
        """Return a reader of the same files that converts to `dtype` and quantises nothing."""
        return WeightReader(self._shards, dtype, self.matrices, self._form)

    def vector(self, name: str, size: int) -> Tensor:
        """Read a vector [size]. `name` is the tensor's full name: "model.norm.weight"."""
        return self._joined([(name, size)], ())

    def table(self, name: str, rows: int, columns: int) -> Tensor:
        """Read a lookup table [rows, columns]."""
        return self._joined([(name, rows)], (columns,))

    def matrix(self, parts: Parts, columns: int, *, bias: bool = False) -> Linear:
        """Read the product with the modules' weights [sum of rows, columns] and their biases."""
        added = None
        if bias:
            added = self._joined([(f"{name}.bias", rows) for name, rows in parts], ())
        found = [self._quantized(name, rows, columns) for name, rows in parts]
        quantized = [weight for weight in found if weight is not None]
        if not quantized:
            return self.matrices.plain(self.dense(parts, columns), added)
        whole = joined(quantized) if len(quantized) == len(parts) else None
        if whole is not None:
            return self._product(whole, added)
        biases: list[Tensor | None] = [None] * len(parts)
        if added is not None:
            biases = list(torch.split(added, [rows for _, rows in parts]))
        return JoinedMatrix(
            [
                self.matrices.plain(self.dense([part], columns), own)
                if weight is None
                else self._product(weight, own)
                for part, weight, own in zip(parts, found, biases, strict=True)
            ]
        )

    def _product(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        return self.matrices.quantized(weight, bias, self._dtype)

    def dense(self, parts: Parts, columns: int) -> Tensor:
        """Read the modules' weights as plain numbers [sum of rows, columns]."""
        if self._form is None:
            return self._joined([(f"{name}.weight", rows) for name, rows in parts], (columns,))
        target = self._allocate((sum(rows for _, rows in parts), columns))
        start = 0
        for name, rows in parts:
            stored = read_quantized(self._shards, self._form, name, rows, columns)
            if stored is None:
                self._fill(target[start : start + rows], f"{name}.weight")
            else:
                target[start : start + rows] = stored.dequantized(self._dtype)
            start += rows
        return target

    def _quantized(self, name: str, rows: int, columns: int) -> QuantizedWeight | None:
        """Read or create the quantised weight of a module; None if it stays unquantised."""
        if self._form is not None:
            return read_quantized(self._shards, self._form, name, rows, columns)
        if self._load_quantization == "none":
            return None
        stored = self._checked(f"{name}.weight", (rows, columns))
        with self._shards.open(stored.name) as source:
            if self._load_quantization == "int8":
                weight = quantize_int8(source)
            else:
                group = group_for(columns)
                if group is None:
                    raise stored.error(
                        f"has {columns} columns, which none of {GROUPS} divides: set "
                        "worker.quantization to int8 or none"
                    )
                weight = quantize_int4(source, group)
        if not weight.scales.isfinite().all():
            raise stored.error("has values that are not finite; download it again")
        return weight

    def _joined(self, tensors: Parts, rest: tuple[int, ...]) -> Tensor:
        """Copy tensors [rows, *rest] into one, from top to bottom."""
        target = self._allocate((sum(rows for _, rows in tensors), *rest))
        start = 0
        for name, rows in tensors:
            self._fill(target[start : start + rows], name)
            start += rows
        return target

    def _allocate(self, shape: tuple[int, ...]) -> Tensor:
        try:
            return torch.empty(shape, dtype=self._dtype, device=self.matrices.device)
        except (RuntimeError, TypeError, OverflowError) as error:  # depends on the size
            raise ModelError(
                f"{self._shards.folder}: the system has no memory for a tensor {list(shape)}: "
                "check the sizes in config.json, or use a machine with more memory"
            ) from error

    def _checked(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._shards.find(name, shape)
        float_dtype(self._shards, name)
        if stored.shape != shape:
            raise ModelError(
                f"{stored.path}: tensor {name} has shape {list(stored.shape)}, but config.json "
                f"asks for {list(shape)}"
            )
        return stored

    def _fill(self, target: Tensor, name: str) -> None:
        stored = self._checked(name, tuple(target.shape))
        with self._shards.open(name) as source:
            target.copy_(source)
        # A sum is not finite if any term is not; the exact check runs only when it is not.
        if not target.sum(dtype=torch.float32).isfinite() and not target.isfinite().all():
            raise stored.error(
                "has values that are not finite in "
                f"{str(self._dtype).removeprefix('torch.')}; download it again, or use float32"
            )


def float_dtype(shards: Shards, name: str) -> torch.dtype:
    """Return the dtype of an unquantised tensor. Raises ModelError."""
    stored = shards.find(name)
    if stored.dtype not in _FLOATS:
        raise stored.error(
            f"has dtype {stored.dtype}; use a version of the model stored as {', '.join(_FLOATS)}"
        )
    return DTYPES[stored.dtype]
