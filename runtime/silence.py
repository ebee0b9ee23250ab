"""Measures how long a peer has sent nothing, without the time in which this process did not run.

While this process does not run (no core is free, SIGSTOP, a long call) its timers are late and the
peer's messages wait unread. By the clock alone, every peer would then look silent at once. So the
task that watches the peer sleeps here, and the lateness of its sleep does not count as silence.
Owned by one task of a link; the task that receives calls `record_message`.
"""

from __future__ import annotations

import asyncio


class Silence:
    """The silence of one peer. It begins now, and may last `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._now_s = asyncio.get_running_loop().time
        self.record_message()

    def record_message(self) -> None:
        self._last_message_s = self._now_s()

    def left_s(self) -> float:
        """Return the time until the peer has been silent too long; at most 0 if it has."""
        return self._last_message_s + self._limit_s - self._now_s()

    def so_far_s(self) -> float:
        """Return the time since the last message."""
        return self._now_s() - self._last_message_s

    async def sleep(self, pause_s: float) -> None:
        """Sleep, but not past the limit. Callers sleep in short pauses: a stop of this process that
        ends before the pause does is not noticed."""
        pause_s = min(pause_s, max(0.0, self.left_s()))
        due_s = self._now_s() + pause_s
        # The caller sets the pause: what exceeds it shows that this process was stopped.
        await asyncio.sleep(pause_s)
        now_s = self._now_s()
        self._last_message_s = min(now_s, self._last_message_s + max(0.0, now_s - due_s))
