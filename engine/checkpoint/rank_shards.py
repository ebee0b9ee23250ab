"""The safetensors files of a folder, reduced to one rank's share of each tensor.

The split axis of a stored tensor follows from its module's name and, if it is quantised, from its
layout. An expert's tensors are split over the ranks that hold it. Slices are views of the mapped
files, so the other ranks' shares are not read. Readers of weights use such shards like whole ones,
with the rank's spec.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from baton.engine.checkpoint.shard_headers import StoredTensor
from baton.engine.checkpoint.shards import Progress, Shards
from baton.engine.spec.model_spec import ModelSpec
from baton.engine.spec.rank_split import RankSplit

_MODULE = re.compile(r"(?P<module>\w+)\.(?P<tensor>\w+)$")
_EXPERT = re.compile(r"\.experts\.(?P<expert>\d+)\.")
_BY_HEAD = ("q_proj", "q_b_proj", "kv_b_proj")
_BY_KV_HEAD = ("k_proj", "v_proj")
_EVENLY = ("gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head")
_ROW_PARALLEL = ("o_proj", "down_proj", "w2")
# Axes of the output and of the input in a quantised module's tensors; None: no such axis.
_TRANSPOSED = {"qweight": (1, 0), "qzeros": (1, 0), "scales": (1, 0), "g_idx": (None, 0)}
_STRAIGHT = {
    "weight": (0, 1),
    "bias": (0, None),
    "weight_packed": (0, 1),
    "weight_scale": (0, 1),
    "weight_scale_inv": (0, 1),
    "weight_zero_point": (0, 1),
    "weight_g_idx": (None, 0),
}
_SCALES = ("scales", "qzeros", "weight_scale", "weight_scale_inv", "weight_zero_point")
_ORDERS = ("g_idx", "weight_g_idx")  # the group of each column

Side = Literal["output", "input"]


@dataclass(frozen=True, slots=True)
class _Cut:
    """The part of a module's matrix that a rank holds: ranges of one axis, in order."""

    side: Side
    runs: tuple[tuple[int, int], ...]  # [start, end) of `whole` equal units
    whole: int


class RankShards(Shards):
    """Same as `Shards`, for one rank."""

    def __init__(
        self, folder: Path, spec: ModelSpec, split: RankSplit, progress: Progress | None = None
    ) -> None:
        """Open the files. `spec` describes the whole model. Raises ModelError like `Shards`."""
        super().__init__(folder, progress)
        self._spec, self._split = spec, split

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """Return the tensor with this rank's shape, and the byte range of the whole tensor."""
        stored = self.find_whole(name, shape)
        parts = self._parts(stored)
        if parts is None:
            return stored
        axis, runs = parts
        mine = list(stored.shape)
        mine[axis] = sum(end - start for start, end in runs)
        return replace(stored, shape=tuple(mine))

    @contextmanager
    def open(self, name: str) -> Iterator[Tensor]:
        """Map this rank's part of the tensor. Raises ModelError."""
        parts = self._parts(self.find_whole(name))
        with super().open(name) as values:
            if name.endswith(".weight_shape"):
                yield self._shape_of_part(name, values)
            elif parts is not None:
                axis, runs = parts
                pieces = [values.narrow(axis, start, end - start) for start, end in runs]
                part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=axis)
                yield self._own_groups(name, values, part) if name.endswith(_ORDERS) else part
            elif self._added_once(name) and self._split_of(name).rank:
                yield torch.zeros_like(values)  # the first rank alone adds the bias
            else:
                yield values

    def unused(self) -> Iterator[StoredTensor]:
        """Same as `Shards.unused`, without the experts of other ranks."""
        return (stored for stored in super().unused() if self._is_held(stored.name))

    def _is_held(self, name: str) -> bool:
        expert = _EXPERT.search(name)
        count = 0 if self._spec.experts is None else self._spec.experts.count
        if expert is None or int(expert["expert"]) >= count:
            return True
        return int(expert["expert"]) in self._split.experts(count)

    def _split_of(self, name: str) -> RankSplit:
        """Return the split of a tensor: of an expert's, over the ranks that hold the expert."""
        split = self._split
        return RankSplit(split.slices, split.slice) if _EXPERT.search(name) else split

    def _own_groups(self, name: str, whole: Tensor, part: Tensor) -> Tensor:
        """Return the groups of a range of columns, counted from its first group. Raises
        ModelError if the columns of one group are not adjacent."""
        if (whole[1:] < whole[:-1]).any():
            raise self.find_whole(name).error(
                f"permutes columns, which {self._split_of(name).ranks} ranks cannot share: set "
                f"worker.tp to 1{self._or_whole(name)}, or use a checkpoint without act-order "
                "(desc_act)"
            )
        return part - part[0]

    def _shape_of_part(self, name: str, whole: Tensor) -> Tensor:
        """Return a packed module's `weight_shape` for this rank's part."""
        cut = self._cut(name.rsplit(".", 2)[-2], self._split_of(name))
        if cut is None:
            return whole
        kept = sum(end - start for start, end in cut.runs)
        part = whole.clone()
        part[0 if cut.side == "output" else 1] *= kept
        part[0 if cut.side == "output" else 1] //= cut.whole
        return part

    def _added_once(self, name: str) -> bool:
        found = _MODULE.search(name)
        return found is not None and found["module"] in _ROW_PARALLEL and found["tensor"] == "bias"

    def _parts(self, stored: StoredTensor) -> tuple[int, list[tuple[int, int]]] | None:
        """Return the split axis of `stored` and this rank's ranges of it; None if every rank has
        all of it. Raises ModelError if the split would divide a packed word or a group."""
        found = _MODULE.search(stored.name)
        split = self._split_of(stored.name)
        cut = None if found is None else self._cut(found["module"], split)
        if found is None or cut is None:
            return None
        axes = _TRANSPOSED.get(found["tensor"]) or _STRAIGHT.get(found["tensor"])
        axis = None if axes is None else axes[0 if cut.side == "output" else 1]
        if axis is None or axis >= len(stored.shape) or stored.shape[axis] == 1:
            return None  # one scale for the matrix
        size = stored.shape[axis]
        bounds = [(start * size, end * size) for start, end in cut.runs]
        divides = any(bound % cut.whole for pair in bounds for bound in pair)
        if divides or self._has_cut_block(found, size, cut.side):
            raise stored.error(
                f"has {size} entries on axis {axis}, which {split.ranks} ranks cannot share: the "
                "split divides a packed word or a group of scales; reduce worker.tp"
                f"{self._or_whole(stored.name)}"
            )
        return axis, [(start // cut.whole, end // cut.whole) for start, end in bounds]

    def _has_cut_block(self, found: re.Match[str], count: int, side: Side) -> bool:
        """Return whether the last of `count` blocks or groups of scales is smaller than the others.
        Ranges of such scales are no ranges of the matrix: it has fewer rows or columns."""
        form = self._spec.quantization
        if form is None or found["tensor"] not in _SCALES:
            return False
        each = form.block_rows if side == "output" else form.group
        return each > 1 and self._matrix_size(found, side) != count * each

    def _matrix_size(self, found: re.Match[str], side: Side) -> int:
        """Return the rows or columns of a quantised module's whole matrix. Rows are asked of FP8
        alone, whose blocks have several."""
        form, prefix = self._spec.quantization, found.string.removesuffix(found["tensor"])
        assert form is not None
        stored = (each for each in ("qweight", "weight_packed") if f"{prefix}{each}" in self)
        name = next(stored, "weight")
        axes = _TRANSPOSED.get(name) or _STRAIGHT[name]
        axis = axes[0 if side == "output" else 1]
        assert axis is not None
        in_words = name != "weight" and form.layout != "awq"  # AWQ packs rows
        return self.find_whole(f"{prefix}{name}").shape[axis] * (32 // form.bits if in_words else 1)

    def _or_whole(self, name: str) -> str:
        """Return a further remedy for an expert's tensor."""
        return " or raise worker.ep" if _EXPERT.search(name) else ""

    def _cut(self, module: str, split: RankSplit) -> _Cut | None:
        if split.ranks == 1:
            return None
        spec = self._spec
        if module in _ROW_PARALLEL:
            return _Cut("input", ((split.rank, split.rank + 1),), split.ranks)
        if module in ("embed_tokens", "lm_head"):
            tokens = split.share(spec.vocab_size)
            return _Cut("output", ((tokens.start, tokens.stop),), spec.vocab_size)
        if module in _BY_HEAD or module in _EVENLY:
            return _Cut("output", ((split.rank, split.rank + 1),), split.ranks)
        kv_heads = split.kv_heads(spec.kv_heads)
        if module in _BY_KV_HEAD:
            return _Cut("output", ((kv_heads.start, kv_heads.stop),), spec.kv_heads)
        if module == "gate_up_proj":
            first = split.ranks + split.rank
            runs = ((split.rank, split.rank + 1), (first, first + 1))
            return _Cut("output", runs, 2 * split.ranks)
        if module == "qkv_proj":
            heads = split.share(spec.heads)
            keys = spec.heads + kv_heads.start, spec.heads + kv_heads.stop
            values = spec.kv_heads + keys[0], spec.kv_heads + keys[1]
            whole = spec.heads + 2 * spec.kv_heads
            return _Cut("output", ((heads.start, heads.stop), keys, values), whole)
        return None
