"""The safetensors files of a folder as if they held one rank's share of each tensor alone.

Which axis of a stored tensor is split follows from its module's name and, for a quantised one, from
its layout; slices are views of the mapped files, so the other ranks' parts are not read. All that
reads weights works on such shards as on whole ones, with the spec of the rank.
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
_BY_HEAD = ("q_proj", "q_b_proj", "kv_b_proj")
_BY_KV_HEAD = ("k_proj", "v_proj")
_EVENLY = ("gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head")
_ROW_PARALLEL = ("o_proj", "down_proj", "w2")
# Axes of the output and of the input in a quantised module's tensors, None where it has none.
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
_ORDERS = ("g_idx", "weight_g_idx")  # the group that each column is in

Side = Literal["output", "input"]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Which part of a module's matrix a rank holds: fractions of an axis, in order."""

    side: Side
    runs: tuple[tuple[int, int], ...]  # [start, end) of `whole` equal units
    whole: int


class RankShards(Shards):
    """Same as `Shards`, for one rank."""

    def __init__(
        self, folder: Path, spec: ModelSpec, split: RankSplit, progress: Progress | None = None
    ) -> None:
        """`spec`: of the whole model. Raises ModelError as `Shards` does."""
        super().__init__(folder, progress)
        self._spec, self._split = spec, split

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The tensor as this rank has it; where the bytes of the whole lie."""
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
        """This rank's part of the tensor. Raises ModelError."""
        parts = self._parts(self.find_whole(name))
        with super().open(name) as values:
            if name.endswith(".weight_shape"):
                yield self._shape_of_part(name, values)
            elif parts is not None:
                axis, runs = parts
                pieces = [values.narrow(axis, start, end - start) for start, end in runs]
                part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=axis)
                yield self._own_groups(name, values, part) if name.endswith(_ORDERS) else part
            elif self._added_once(name) and self._split.rank:
                yield torch.zeros_like(values)  # the sum over the ranks adds a bias once
            else:
                yield values

    def _own_groups(self, name: str, whole: Tensor, part: Tensor) -> Tensor:
        """The groups that a run of columns is in, counted from the first one of the run. Raises
        ModelError where columns of one group lie apart."""
        if (whole[1:] < whole[:-1]).any():
            raise self.find_whole(name).error(
                f"permutes columns, which {self._split.ranks} ranks cannot share: set worker.tp "
                "to 1, or use a checkpoint without act-order (desc_act)"
            )
        return part - part[0]

    def _shape_of_part(self, name: str, whole: Tensor) -> Tensor:
        """The shape that a packed module's `weight_shape` names, of this rank's part."""
        cut = self._cut(name.rsplit(".", 2)[-2])
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
        """The axis of `stored` that is split and this rank's runs of it; None: it is whole on
        every rank. Raises ModelError where a packed or grouped axis cannot be cut so."""
        found = _MODULE.search(stored.name)
        cut = None if found is None else self._cut(found["module"])
        if found is None or cut is None:
            return None
        axes = _TRANSPOSED.get(found["tensor"]) or _STRAIGHT.get(found["tensor"])
        axis = None if axes is None else axes[0 if cut.side == "output" else 1]
        if axis is None or axis >= len(stored.shape) or stored.shape[axis] == 1:
            return None  # one scale for all
        size = stored.shape[axis]
        bounds = [(start * size, end * size) for start, end in cut.runs]
        if any(bound % cut.whole for pair in bounds for bound in pair):
            raise stored.error(
                f"has {size} entries on axis {axis}, which {self._split.ranks} ranks cannot share: "
                "a packed word or a group of scales would be cut; set worker.tp to a smaller number"
            )
        return axis, [(start // cut.whole, end // cut.whole) for start, end in bounds]

    def _cut(self, module: str) -> _Cut | None:
        spec, split = self._spec, self._split
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
