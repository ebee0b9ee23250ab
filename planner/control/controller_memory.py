"""The signed text that a role controller leaves for its successor, kept beside the leadership.

    leader ─ keep, before each order ─▶ store of the leadership ─ recall, in a new term ─▶ leader

Only the leader can write. The text has the time of the store, not of a process, so that the
successor knows its age. Processes that can write to the store can delete a memory, or put an older
one back, which is then as old as it says; they cannot write one. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.planner.control.leadership import Leadership
from baton.runtime.shared_registry.signed_json import SignedJson

MAX_MEMORY_BYTES = 1 << 20  # the hour's changes of 10,000 workers
_FIELDS = frozenset(("at_s", "memory"))


@dataclass(frozen=True, slots=True)
class RecalledMemory:
    """A memory and its age in seconds."""

    memory: Mapping[str, Any]
    age_s: float


class ControllerMemory:
    """`tokens` are those that the cluster accepts; the first one signs.
    `leadership` is whose store it uses."""

    def __init__(self, leadership: Leadership, tokens: tuple[str, ...]) -> None:
        self.leadership = leadership
        self._texts = SignedJson(tokens, b"baton-control", _FIELDS, MAX_MEMORY_BYTES, "memory")

    async def keep(self, memory: Mapping[str, object]) -> None:
        """Replace the memory. Raises Unavailable if the write may have failed."""
        content = {"at_s": await self.leadership.time(), "memory": dict(memory)}
        await self.leadership.store(self._texts.write(content))

    async def recall(self) -> RecalledMemory | None:
        """Return the newest memory; None if there is none. Raises ValueError for one that is not
        valid, and Unavailable if the store cannot be read."""
        text = await self.leadership.load()
        if text is None:
            return None
        found = self._texts.read(text)
        reason = found if isinstance(found, str) else _fault(found)
        if isinstance(found, str) or reason is not None:
            raise ValueError(reason)
        now_s = await self.leadership.time()
        return RecalledMemory(found["memory"], max(0.0, now_s - found["at_s"]))


def _fault(found: Mapping[str, Any]) -> str | None:
    at_s, memory = found["at_s"], found["memory"]
    if isinstance(at_s, bool) or not isinstance(at_s, int | float):
        return "its time is not a number"
    return None if isinstance(memory, dict) else "its content is not one of this version"
