"""Compiled attention over an eight-bit pool, which reads blocks in place.

A bfloat16 model uses `attention_kv_quant_bf16` if the processor has its instruction, and
`TorchAttention` for chunks of many rows on AMX; all others use the strict kernel of the
deterministic mode, in float32. One kernel writes all rows, with the codes of `KvQuant`. Up to
rounding, the results equal those of `TorchAttention` over the same pool. The module needs numba
and only has views of the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.cpu.attention_bf16 import torch_is_faster
from baton.engine.cpu.attention_invariant import InvariantAttention
from baton.engine.cpu.attention_kv_quant_bf16 import BfloatKvQuantAttention, usable
from baton.engine.cpu.kv_quant_numba import Slabs
from baton.engine.cpu.rotation_bf16 import rotate_into
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import TorchAttention
from baton.engine.model.rope import rotate
from baton.engine.model.step_layout import ChunkRows, StepLayout
from baton.engine.spec.model_spec import AttentionSpec

_LEAST_TORCH_ROWS = 256  # of a chunk on AMX: for fewer, torch's gather costs more than it gains


class KvQuantAttention(TorchAttention):
    """The attention of a float32 or bfloat16 model over a quantised pool. A decode row's result
    depends only on its own sequence, bit for bit."""

    def __init__(self, pool: KvPool, spec: AttentionSpec) -> None:
        super().__init__(pool, spec)
        self._slabs = Slabs(pool)
        # one of the two is there
        self.fast = BfloatKvQuantAttention(pool, spec) if usable(pool) else None
        self.strict = InvariantAttention(pool, spec) if self.fast is None else None
        none = torch.zeros(0, dtype=torch.int64)
        kv = torch.zeros(0, pool.tensor.shape[1], 2, pool.tensor.shape[-1], dtype=pool.dtype)
        self._slabs.write(0, none, none, kv)  # compiles
        if self.fast is not None:
            self.fast.warm_up()

    bfloat_pool: Tensor | None = None  # the decode pass reads no quantised pool

    def write(self, layer: int, keys: Tensor, values: Tensor, layout: StepLayout) -> None:
        kv = torch.stack((keys, values), dim=2)  # [rows, kv_heads, 2, head_dim]
        self._slabs.write(layer, layout.write_blocks, layout.write_slots, kv)

    def rotate_and_write(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: tuple[Tensor, Tensor],
        layout: StepLayout,
    ) -> Tensor:
        """Same as `RotatingAttention`."""
        if self.fast is None or angles[0].shape[-1] % 32:
            self.write(layer, rotate(keys, *angles), values, layout)
            return rotate(queries, *angles)
        rows, heads, dim = keys.shape
        kv = torch.empty(rows, heads, 2, dim, dtype=keys.dtype)
        strides = (2 * kv.stride(0), 2 * kv.stride(1), 0, 2 * kv.stride(2), 0)
        positions = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
        turned = rotate_into(kv.data_ptr(), strides, (queries, keys, values), angles, positions)
        self._slabs.write(layer, layout.write_blocks, layout.write_slots, kv)
        return turned

    def attend(self, layer: int, queries: Tensor, layout: StepLayout) -> Tensor:
        if self.strict is not None:
            return self.strict.attend(layer, queries, layout)
        return super().attend(layer, queries, layout)

    def decode(self, layer: int, queries: Tensor, layout: StepLayout) -> Tensor:
        assert self.fast is not None
        return self.fast.decode(layer, queries, layout.decode_tables, layout.decode_lengths)

    def chunk(self, layer: int, queries: Tensor, chunk: ChunkRows) -> Tensor:
        assert self.fast is not None
        if torch_is_faster(self._spec, len(queries), _LEAST_TORCH_ROWS):
            return super().chunk(layer, queries, chunk)
        return self.fast.chunk(layer, queries, chunk)
