"""Batch-invariant attention: a row's bits depend only on its own sequence.

One compiled kernel computes rows of chunks and decode rows: it reads the tokens of a sequence in
tiles that start at fixed positions, and sums in one fixed order. Neither the batch, nor the
division of a prompt into chunks, nor the number of threads changes a bit. Up to rounding, the
results equal those of `TorchAttention`. The module needs numba and only has views of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.cpu.compiled import take_threads
from baton.engine.cpu.kv_quant_numba import Slabs
from baton.engine.cpu.strict_kernels import attend_rows
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import TorchAttention
from baton.engine.model.step_layout import StepLayout
from baton.engine.spec.model_spec import AttentionSpec
from baton.runtime.errors import ConfigError

_JOB_ROWS = 128  # query rows times heads that share the loading of a tile
Ints = NDArray[np.int32]


class InvariantAttention(TorchAttention):
    """`TorchAttention` that computes attention with the strict kernel."""

    def __init__(self, pool: KvPool, spec: AttentionSpec) -> None:
        """Connect the pool. Raises ConfigError if the kernel does not read its dtype."""
        super().__init__(pool, spec)
        if pool.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"worker.deterministic: KV in {pool.dtype} is not supported; set worker.dtype to "
                "float32 or bfloat16"
            )
        self._slabs = None if pool.quant is None else Slabs(pool)
        self._numbers: tuple[NDArray[Any], np.uint32] | None = None
        if pool.quant is None:
            wide = pool.dtype == torch.float32
            bits = pool.tensor.view(torch.int32 if wide else torch.int16).numpy()
            # A bfloat16 is the upper half of a float32: its bits times 2^16 are those of one.
            widen = np.uint32(1 if wide else 1 << 16)
            self._numbers = bits.view(np.uint32 if wide else np.uint16), widen
        self._jobs: tuple[StepLayout, _Jobs] | None = None  # of the running step
        self._warm_up()

    def attend(self, layer: int, queries: Tensor, layout: StepLayout) -> Tensor:
        if self._jobs is None or self._jobs[0] is not layout:
            group = queries.shape[1] // self._pool.tensor.shape[1]
            self._jobs = layout, _jobs(layout, max(1, _JOB_ROWS // group))
        # A job that gets no scratch memory ends without an error, and its rows stay NaN.
        out = torch.full(queries.shape, torch.nan)
        self._run(layer, queries.to(torch.float32).contiguous(), self._jobs[1], out)
        return out.to(queries.dtype)

    def _run(self, layer: int, queries: Tensor, jobs: _Jobs, out: Tensor) -> None:
        take_threads()
        attend_rows(
            self._numbers,
            None if self._slabs is None else self._slabs.of(layer),
            self._pool.tensor.shape[1],
            layer,
            queries.numpy(),
            jobs.rows,
            jobs.tables,
            np.float32(self._spec.scale),
            np.float32(self._spec.soft_cap),
            self._spec.windows[layer],
            out.numpy(),
        )

    def _warm_up(self) -> None:
        """Compile before serving, on the first block's first token."""
        _, kv_heads, _, _, _, dim = self._pool.tensor.shape
        queries = torch.zeros((1, kv_heads, dim))
        rows = np.array([[0, 1, 0, 0]], dtype=np.int32)
        self._run(0, queries, _Jobs(rows, np.zeros(1, dtype=np.int32)), torch.empty_like(queries))


@dataclass(frozen=True, slots=True)
class _Jobs:
    """Ranges of consecutive rows of one sequence; a thread computes one range at a time."""

    rows: Ints  # [runs, 4]: first row, number of rows, position of the first, index in `tables`
    tables: Ints  # all block tables, one after the other


def _jobs(layout: StepLayout, most: int) -> _Jobs:
    """Divide the rows into ranges of at most `most`. The division changes no bit of a result."""
    decodes = layout.decode_rows
    width = layout.decode_tables.shape[1]
    rows = [
        (row, 1, length - 1, row * width)
        for row, length in enumerate(layout.decode_lengths.tolist())
    ]
    tables = [layout.decode_tables.numpy().reshape(-1)]
    table_start = decodes * width
    for chunk in layout.chunks:
        for first in range(chunk.first, chunk.end, most):
            count = min(most, chunk.end - first)
            rows.append((first, count, chunk.start + first - chunk.first, table_start))
        tables.append(chunk.blocks.numpy().astype(np.int32))
        table_start += len(chunk.blocks)
    return _Jobs(np.array(rows, dtype=np.int32), np.concatenate(tables))
