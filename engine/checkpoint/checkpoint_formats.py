"""Converts the quantised matrices of published checkpoints to `QuantizedWeight`.

The formats are AutoAWQ's "gemm" packing (eight columns of the output in 32 bits, interleaved),
GPTQ's (eight or four rows of the input in 32 bits; version 1 stores each zero point minus one, and
0 as the highest code), compressed-tensors' pack_to_int32 (columns of the input, codes shifted to
be positive), and FP8 E4M3 with scales to multiply by. The module reads through `Shards` and keeps
no state.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.checkpoint.shards import Shards
from baton.engine.model.quantized_weight import CodeDtype, QuantizedWeight, pack_pairs
from baton.engine.spec.quantization_config import StoredQuantization
from baton.runtime.errors import ModelError

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # index of each column in a word
_SCALES = ("F32", "F16", "BF16")
_CHUNK = 512  # rows of the output unpacked at a time


def read_quantized(
    shards: Shards, form: StoredQuantization, name: str, rows: int, columns: int
) -> QuantizedWeight | None:
    """Read the weight [rows, columns] of a module; None if it is stored unquantised. Raises
    ModelError with file, tensor and expected shape if the files contradict `form`."""
    if not _is_quantized(shards, form, name):
        return None
    module = _Module(shards, form, name, rows, columns)
    if columns % (32 // form.bits) or (form.layout == "awq" and rows % 8):
        raise shards.find(module.main).error(
            f"is packed, but a matrix [{rows}, {columns}] as in config.json cannot be packed; "
            "use the config.json that belongs to these weights"
        )
    if form.layout == "awq":
        return module.awq()
    if form.layout in ("gptq", "gptq_v2"):
        return module.gptq()
    return module.packed() if form.layout == "packed" else module.plain_codes()


def _is_quantized(shards: Shards, form: StoredQuantization, name: str) -> bool:
    if form.layout in ("int8", "fp8"):
        dtype = "I8" if form.layout == "int8" else "F8_E4M3"
        weight = f"{name}.weight"
        return weight in shards and shards.find(weight).dtype == dtype
    return f"{name}.{_main(form)}" in shards


def _main(form: StoredQuantization) -> str:
    """Return the name of the tensor with the codes."""
    return {
        "awq": "qweight",
        "gptq": "qweight",
        "gptq_v2": "qweight",
        "packed": "weight_packed",
    }.get(form.layout, "weight")


class _Module:
    """The tensors of one quantised module, in the checkpoint's format."""

    def __init__(
        self, shards: Shards, form: StoredQuantization, name: str, rows: int, columns: int
    ) -> None:
        self._shards = shards
        self._form = form
        self._name = name
        self._rows = rows
        self._columns = columns
        self._group = form.group or columns
        self._groups = -(-columns // self._group)
        self._per_word = 32 // form.bits
        self.main = f"{name}.{_main(form)}"

    def awq(self) -> QuantizedWeight:
        words = self._words("qweight", (self._columns, self._rows // 8))
        codes = self._empty_codes()
        for first in range(0, self._rows, _CHUNK):
            part = _spread(words[:, first // 8 : (first + _CHUNK) // 8], 4, _AWQ_ORDER)
            codes[first : first + _CHUNK] = self._codes(part.t())
        zeros = _spread(self._words("qzeros", (self._groups, self._rows // 8)), 4, _AWQ_ORDER)
        return self._weight(codes, self._scales_across(), zeros.t().to(torch.int16))

    def gptq(self) -> QuantizedWeight:
        bits, per_word = self._form.bits, self._per_word
        words = self._words("qweight", (self._columns // per_word, self._rows))
        order = self._order("g_idx")
        codes = self._empty_codes()
        for first in range(0, self._rows, _CHUNK):
            part = _spread(words[:, first : first + _CHUNK].t(), bits)
            codes[first : first + _CHUNK] = self._codes(part, order)
        packed = self._words("qzeros", (self._groups, -(-self._rows // per_word)))
        zeros = _spread(packed, bits)[:, : self._rows].t().to(torch.int16)
        if self._form.layout == "gptq":
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return self._weight(codes, self._scales_across(), self._centred(zeros), order)

    def packed(self) -> QuantizedWeight:
        words = self._words("weight_packed", (self._rows, self._columns // self._per_word))
        self._check_shape()
        order = self._order("weight_g_idx")
        codes = self._empty_codes()
        for first in range(0, self._rows, _CHUNK):
            part = _spread(words[first : first + _CHUNK], self._form.bits)
            codes[first : first + _CHUNK] = self._codes(part, order)
        zeros = None if self._form.symmetric else self._packed_zeros()
        return self._weight(codes, self._scales("weight_scale"), zeros, order)

    def plain_codes(self) -> QuantizedWeight:
        """Read int8 or fp8: one code per entry."""
        codes = self._read("weight", (self._rows, self._columns))
        if self._form.layout == "fp8":
            broken = (codes.view(torch.uint8) & 0x7F) == 0x7F
            if broken.any():
                raise self._error("weight", "has NaN codes; download it again")
            name = "weight_scale"
            if f"{self._name}.{name}_inv" in self._shards:
                name = "weight_scale_inv"
            return self._weight(codes, self._scales(name))
        zeros = None
        if not self._form.symmetric:
            zeros = self._read("weight_zero_point", *self._scale_shapes(), dtypes=("I8",))
            zeros = self._spread_rows(zeros).to(torch.int16)
        return self._weight(codes, self._scales("weight_scale"), zeros)

    def _weight(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        order: Tensor | None = None,
    ) -> QuantizedWeight:
        code_dtype: CodeDtype = "int4" if self._form.bits == 4 else "int8"
        if self._form.layout == "fp8":
            code_dtype = "fp8"
        if zeros is not None:
            zeros = zeros.contiguous()
        return QuantizedWeight(code_dtype, codes, scales.contiguous(), self._group, zeros, order)

    def _empty_codes(self) -> Tensor:
        if self._form.bits == 4:
            return torch.empty((self._rows, self._columns // 2), dtype=torch.uint8)
        return torch.empty((self._rows, self._columns), dtype=torch.int8)

    def _codes(self, unpacked: Tensor, order: Tensor | None = None) -> Tensor:
        """Convert int32 codes [rows, columns], counted from 0, to the codes of the result."""
        if order is not None:
            unpacked = unpacked[:, order]
        if self._form.bits == 4:
            return pack_pairs(unpacked.to(torch.uint8))
        return (unpacked - 128).to(torch.int8)

    def _centred(self, zeros: Tensor) -> Tensor:
        return zeros if self._form.bits == 4 else zeros - 128

    def _packed_zeros(self) -> Tensor:
        """Read zero points, packed along the rows or, by older writers, one signed byte each."""
        name = "weight_zero_point"
        if self._shards.find(f"{self._name}.{name}").dtype == "I8":
            around = self._read(name, (self._rows, self._groups), dtypes=("I8",)).to(torch.int16)
            return around + 8 if self._form.bits == 4 else around
        words = self._words(name, (-(-self._rows // self._per_word), self._groups))
        zeros = _spread(words.t(), self._form.bits)[:, : self._rows].t()
        return self._centred(zeros.to(torch.int16))

    def _scales_across(self) -> Tensor:
        """Read scales [groups, rows], as AWQ and GPTQ store them, as [rows, groups]."""
        scales = self._read("scales", (self._groups, self._rows), dtypes=_SCALES)
        return self._finite("scales", scales).t()

    def _scales(self, name: str) -> Tensor:
        scales = self._read(name, *self._scale_shapes(), dtypes=_SCALES)
        return self._spread_rows(self._finite(name, scales))

    def _scale_shapes(self) -> list[tuple[int, ...]]:
        block = self._form.block_rows
        if self._form.group:
            return [(-(-self._rows // block), self._groups)]
        rows = [(self._rows, 1), (self._rows,)]
        return rows if block else [*rows, (), (1,), (1, 1)]

    def _spread_rows(self, stored: Tensor) -> Tensor:
        """Repeat stored scales for every row of the matrix: [rows, groups]."""
        if stored.dim() < 2:
            stored = stored.reshape(-1, 1)
        if stored.shape[0] == self._rows:
            return stored
        block = self._form.block_rows or self._rows
        return stored.repeat_interleave(block, dim=0)[: self._rows]

    def _finite(self, name: str, scales: Tensor) -> Tensor:
        scales = scales.to(torch.float32)
        if not scales.isfinite().all():
            raise self._error(name, "has values that are not finite; download it again")
        return scales

    def _order(self, name: str) -> Tensor | None:
        """Return the permutation of GPTQ's act order, from the group of each column."""
        if f"{self._name}.{name}" not in self._shards:
            return None
        groups = self._read(name, (self._columns,), dtypes=("I32", "I64")).to(torch.int64)
        in_order = torch.arange(self._columns) // self._group
        if torch.equal(groups, in_order):
            return None
        order = torch.argsort(groups, stable=True)
        if not torch.equal(groups[order], in_order):
            raise self._error(
                name, f"does not name {self._groups} groups of {self._group} columns each"
            )
        return order

    def _check_shape(self) -> None:
        name = "weight_shape"
        if f"{self._name}.{name}" not in self._shards:
            return
        found = self._read(name, (2,), dtypes=("I32", "I64")).tolist()
        if found != [self._rows, self._columns]:
            raise self._error(
                name, f"says {found}, but config.json asks for {[self._rows, self._columns]}"
            )

    def _words(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._read(name, shape, dtypes=("I32",))

    def _read(
        self, name: str, *shapes: tuple[int, ...], dtypes: tuple[str, ...] | None = None
    ) -> Tensor:
        """Return a copy of a tensor that has one of `shapes`; an error names the first of them."""
        stored = self._shards.find(f"{self._name}.{name}")
        if stored.shape not in shapes:
            raise ModelError(
                f"{stored.path}: tensor {stored.name} has shape {list(stored.shape)}, but "
                f"config.json asks for {list(shapes[0])}"
            )
        if dtypes is not None and stored.dtype not in dtypes:
            raise stored.error(f"has dtype {stored.dtype}; {' or '.join(dtypes)} is needed")
        with self._shards.open(stored.name) as source:
            return source.clone()

    def _error(self, name: str, reason: str) -> ModelError:
        return self._shards.find(f"{self._name}.{name}").error(reason)


def _spread(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpack int32 [rows, words] to codes [rows, words x 32 / bits] from 0; `order` is the index
    of each code in its word (None: lowest bits first)."""
    per_word = 32 // bits
    shifts = torch.tensor(order or range(per_word), dtype=torch.int32) * bits
    codes = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(words.shape[0], math.prod(codes.shape[1:]))
