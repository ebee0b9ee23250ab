"""Deliberate breaks of the READs of cached blocks, by which a conversation's history is moved.

A part of mutations.py, which says what they are for.
"""

from __future__ import annotations

from typing import Any

from baton.kv_transfer.peers.cached_prefix import CachedPrefix
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import PrefillScheduler
from baton.simulation.mutations.patches import Break, always


def _all_verified(before: Any) -> Any:
    def read_ended(self: PrefillScheduler, prompt: Prompt, verified: int) -> None:
        filled = prompt.blocks[prompt.cached : prompt.reading_to]
        before(self, prompt, verified if -1 in filled else len(filled))

    return read_ended


OF_TURNS: dict[str, Break] = {
    "use-unverified-history": Break(
        "what a READ of cached blocks left is used, verified or not",
        PrefillScheduler,
        "read_ended",
        _all_verified,
    ),
    "keep-pins-of-history": Break(
        "cached blocks stay pinned for a reader that is gone", CachedPrefix, "end", always(None)
    ),
    "reuse-destinations-of-history": Break(
        "destinations of an unfinished READ of cached blocks are not set aside",
        PrefillScheduler,
        "quarantine",
        always(None),
    ),
}
