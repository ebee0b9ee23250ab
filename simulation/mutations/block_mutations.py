"""Deliberate breaks of blocks that a handoff has beside a prompt's own: cached blocks, by which a
conversation's history is moved, and blocks converted to the reader's dtype.

A part of mutations.py, which says what they are for.
"""

from __future__ import annotations

from typing import Any

from baton.kv_transfer.peers.cached_prefix import CachedPrefix
from baton.kv_transfer.peers.converted_prompt import ConvertedPrompt
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import PrefillScheduler
from baton.simulation.mutations.patches import Break, always


def _all_verified(before: Any) -> Any:
    def read_ended(self: PrefillScheduler, prompt: Prompt, verified: int) -> None:
        filled = prompt.blocks[prompt.cached : prompt.reading_to]
        before(self, prompt, verified if -1 in filled else len(filled))

    return read_ended


def _freed_under_a_conversion(_: Any) -> Any:
    def end(self: ConvertedPrompt) -> None:
        self._prompt.end()
        self._unpin()

    return end


OF_CACHED_BLOCKS: dict[str, Break] = {
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

OF_CONVERTED_BLOCKS: dict[str, Break] = {
    "keep-converted-blocks": Break(
        "converted blocks stay pinned after their handoff", ConvertedPrompt, "_unpin", always(None)
    ),
    "free-under-a-conversion": Break(
        "targets are free while a conversion still writes into them",
        ConvertedPrompt,
        "end",
        _freed_under_a_conversion,
    ),
}
