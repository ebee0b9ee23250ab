"""Deliberate breaks of speculative decoding: acceptance, and what becomes of rejected tokens.

A part of mutations.py, which says what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from baton.decode_worker.kv_reservations import KvReservations
from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Sequence
from baton.engine.scheduling.batch import Drawn, Slice
from baton.simulation.fleet import hash_engine
from baton.simulation.mutations.patches import Break, always


def _one_too_many(before: Any) -> Any:
    def accepted(item: Slice, drawn: Seq[Drawn]) -> tuple[Drawn, ...]:
        return tuple(drawn[: len(before(item, drawn)) + 1])

    return accepted


def _all_published(before: Any) -> Any:
    def verified(self: Any, plan: Any, index: int, result: Any) -> Any:
        sequence, item = plan.decoding[index], plan.batch.slices[index]
        computed = sequence.computed
        sequence.computed += len(item.tokens)
        proposals = tuple(Drawn(sequence.choice, token) for token in item.tokens[1:])
        self.reservations.publish_grown(sequence, proposals)
        sequence.computed = computed
        del sequence.identities[computed // self._pool.block_size :]
        return before(self, plan, index, result)

    return verified


OF_SPECULATION: dict[str, Break] = {
    "accept-one-too-many": Break(
        "the token after the first difference is accepted", hash_engine, "accepted", _one_too_many
    ),
    "publish-rejected-tokens": Break(
        "blocks of proposals are published before the verdict",
        DecodeScheduler,
        "_verified",
        _all_published,
    ),
    "publish-without-the-draft": Break(
        "blocks are published whose draft model is behind",
        Sequence,
        "shareable",
        lambda before: property(lambda self: self.computed),
    ),
    "keep-rejected-blocks": Break(
        "blocks of rejected tokens stay with their sequence", KvReservations, "trim", always(None)
    ),
}
