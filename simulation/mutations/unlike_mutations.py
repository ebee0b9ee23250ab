"""Deliberate breaks of handoffs between workers that store KV in different dtypes.

A part of mutations.py, which says what they are for.
"""

from __future__ import annotations

from typing import Any

from baton.kv_transfer.peers.converted_prompt import ConvertedPrompt
from baton.simulation.mutations.patches import Break, always


def _freed_under_a_conversion(_: Any) -> Any:
    def end(self: ConvertedPrompt) -> None:
        self._prompt.end()
        self._unpin()

    return end


OF_UNLIKE_WORKERS: dict[str, Break] = {
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
