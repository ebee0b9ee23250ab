"""How long a peer has said nothing, as far as this process was there to hear it.

While this process stands still (another's turn on its cores, SIGSTOP, a long call) its timers
are late, and what the peer has sent waits unread. Who then judges by the clock alone blames the
peer, and every peer at once. So the judge sleeps here, and what its sleep is late by is no
silence. Owned by one task of a link; whoever receives calls `heard`.
"""

from __future__ import annotations

import asyncio


class Silence:
    """It begins now, and may last `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.heard()

    def heard(self) -> None:
        self._heard_s = _now()

    def left_s(self) -> float:
        """Until the peer has been silent too long; at most 0 when it has."""
        return self._heard_s + self._limit_s - _now()

    async def sleep(self, pause_s: float) -> None:
        """Sleep, but not past the limit. In parts: what happened during one that was not late
        in the end is not seen."""
        due_s = _now() + min(pause_s, max(0.0, self.left_s()))
        await asyncio.sleep(due_s - _now())
        late_s = max(0.0, _now() - due_s)
        self._heard_s = min(_now(), self._heard_s + late_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
