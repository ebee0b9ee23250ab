"""Deliberate breaks of handoffs between workers with unlike KV dtypes or block sizes.

A part of mutations.py, which says what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.decode_worker import handoffs
from baton.kv_transfer.block_sizes import BlockRatio
from baton.kv_transfer.fetch_ledger import FetchLedger
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.own_order import OwnOrder
from baton.prefill_worker.cached_reads import CachedReads
from baton.simulation.mutations.patches import Break, always


def _into_the_wrong_cells(before: Any) -> Any:
    def cells(self: BlockRatio, blocks: Sequence[int], count: int) -> list[tuple[int, ...]]:
        placed: list[tuple[int, ...]] = before(self, blocks, count)
        if self.joined > 1:
            even = count - count % 2
            placed[:even] = [placed[index ^ 1] for index in range(even)]
        return [parts[::-1] for parts in placed]

    return cells


def _checked_in_part(before: Any) -> Any:
    def record_checked(self: FetchLedger, indices: Sequence[int]) -> list[range]:
        joined = self._peer.ratio.joined
        whole = {index - (index - self.first) % joined for index in indices}
        return [range(first, min(first + joined, self.end)) for first in sorted(whole)]

    return record_checked


def _calls_forgotten(before: Any) -> Any:
    def quarantine(self: OwnOrder, *given: Any) -> None:
        kept, self._calls = self._calls, {}
        before(self, *given)
        self._calls = kept

    return quarantine


OF_UNLIKE_WORKERS: dict[str, Break] = {
    "publish-imprecise-history": Break(
        "a prefill worker caches as exact what it has read from KV in eight bits",
        CachedReads,
        "loses",
        always(False),
    ),
    "publish-imprecise-prompts": Break(
        "a decode worker caches as exact what a prefill worker in eight bits has computed",
        handoffs,
        "loses",
        always(False),
    ),
    "keep-the-granters-order": Break(
        "what was read from blocks of another size stays in the granter's order",
        HostPool,
        "put_in_order",
        always(None),
    ),
    "read-into-the-wrong-half": Break(
        "a granter's block lands where its neighbour belongs, with its right checksums",
        BlockRatio,
        "cells",
        _into_the_wrong_cells,
    ),
    "check-half-a-block": Break(
        "a block counts as verified once one of the granter's blocks in it is",
        FetchLedger,
        "record_checked",
        _checked_in_part,
    ),
    "free-while-put-in-order": Break(
        "blocks are free while a thread still puts them into the own order",
        OwnOrder,
        "quarantine",
        _calls_forgotten,
    ),
}
