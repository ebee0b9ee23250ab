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
        self._now_s = asyncio.get_running_loop().time
        self.heard()

    def heard(self) -> None:
        self._heard_s = self._now_s()

    def left_s(self) -> float:
        """Until the peer has been silent too long; at most 0 when it has."""
        return self._heard_s + self._limit_s - self._now_s()

    def so_far_s(self) -> float:
        """Since the last word."""
        return self._now_s() - self._heard_s

    async def sleep(self, pause_s: float) -> None:
        """Sleep, but not past the limit. In parts: what happened during one that was not late
        in the end is not seen."""
        pause_s = min(pause_s, max(0.0, self.left_s()))
        due_s = self._now_s() + pause_s
        await asyncio.sleep(pause_s)
        now_s = self._now_s()
        self._heard_s = min(now_s, self._heard_s + max(0.0, now_s - due_s))
