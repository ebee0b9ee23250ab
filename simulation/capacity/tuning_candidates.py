"""The candidates of a search: the first ones, and the neighbours of a good one. Pure.

each size of a worker (GPUs, timing model) × ratios of prefill to decode workers  ─┐ first
                                           × colocated workers, several chunks    ─┘
one worker in the other role, chunk, batch, local chunk: half and twice           ─┐ neighbours
prompts that may be computed where they are decoded, or never                     ─┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton.planner.timing_fit import Fit
from baton.runtime.config import PlacementMode
from baton.runtime.errors import ConfigError
from baton.simulation.capacity.layout import Layout

MAX_RATIOS = 24  # of one size of a worker
LOCAL_CHUNKS = (256, 512, 1024, 2048)
CHUNK_TOKENS = (128, 65_536)  # of a search, at least and at most
BATCH = (4, 4096)


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """One kind of worker: its GPUs, over which its model is split, its timing model and its
    pool."""

    gpus: int
    fit: Fit
    pool_tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration. `placement`: of prompts, where there are prefill workers."""

    layout: Layout
    size: WorkerSize
    placement: PlacementMode = "auto"

    @property
    def key(self) -> tuple[Layout, PlacementMode]:
        return self.layout, self.placement


def first_candidates(
    gpus: int, base: Layout, sizes: Sequence[WorkerSize], most: int
) -> list[Candidate]:
    """Return ratios of prefill to decode workers, and colocated workers, of each size: about `most`
    of them, the ratios evenly spaced. Raises ConfigError if there are GPUs for no worker."""
    found = []
    ratios = max(1, min(MAX_RATIOS, most // len(sizes) - len(LOCAL_CHUNKS)))
    for size in sizes:
        workers = gpus // size.gpus
        if workers < 1:
            raise ConfigError(f"{gpus} GPUs are less than a worker's {size.gpus}: give more")
        own = replace(base, gpus_per_worker=size.gpus, pool_tokens=size.pool_tokens)
        for prefill in _evenly(workers - 1, ratios):
            layout = replace(own, prefill=prefill, decode=workers - prefill, colocated=0)
            found.append(Candidate(layout, size))
        for chunk in LOCAL_CHUNKS:
            together = replace(own, prefill=0, decode=0, colocated=workers)
            found.append(Candidate(replace(together, local_chunk_tokens=chunk), size))
    return found


def _evenly(last: int, count: int) -> list[int]:
    """Return at most `count` whole numbers from 1 to `last`, the middle one where it is one."""
    if last < 1:
        return []
    if count == 1:
        return [(last + 1) // 2]
    return [int(each) for each in np.unique(np.linspace(1, last, min(count, last)).round())]


def neighbours(candidate: Candidate) -> Iterator[Candidate]:
    """Yield what differs from a candidate in one thing."""
    layout = candidate.layout

    def changed(**fields: int) -> Candidate:
        return replace(candidate, layout=replace(layout, **fields))

    local = (layout.local_chunk_tokens, CHUNK_TOKENS, "local_chunk_tokens")
    amounts = [(layout.max_sequences, BATCH, "max_sequences")]
    if layout.colocated:
        amounts = [local, *amounts]
    else:
        for step in (1, -1):
            if layout.prefill + step and layout.decode - step:
                yield changed(prefill=layout.prefill + step, decode=layout.decode - step)
        other: PlacementMode = "disaggregated" if candidate.placement == "auto" else "auto"
        yield replace(candidate, placement=other)
        amounts = [(layout.chunk_tokens, CHUNK_TOKENS, "chunk_tokens"), *amounts]
        if candidate.placement == "auto":
            amounts.append(local)
    for amount, (low, high), name in amounts:
        for factor in (2, 0.5):
            if low <= amount * factor <= high:
                yield changed(**{name: int(amount * factor)})
