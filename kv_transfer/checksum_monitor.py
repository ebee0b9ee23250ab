"""The monitor of a granter's checksum calls: their age, and whether their thread is stuck.

The mover that owns the thread reports the begin and the end of each call in the thread, since a
caller that stops waiting does not free a stuck thread. The module is pure: time is passed in.
"""

from __future__ import annotations

STUCK_S = 2.0  # a call checksums 64 MiB at most, in about 50 ms


class ChecksumMonitor:
    def __init__(self) -> None:
        self._pending: dict[object, float] = {}  # the oldest first
        self._ended_s = 0.0

    def begin(self, call: object, now_s: float) -> None:
        self._pending[call] = now_s

    def end(self, call: object, now_s: float) -> None:
        self._pending.pop(call, None)
        self._ended_s = now_s

    def oldest_s(self, now_s: float) -> float:
        """Return the age of the oldest pending call; 0: none is pending."""
        return max(0.0, now_s - next(iter(self._pending.values()), now_s))

    def failure_reason(self, now_s: float) -> str | None:
        """Return why no checksum can be computed any more; None while calls end."""
        if not self._pending:
            return None
        stuck_s = min(self.oldest_s(now_s), now_s - self._ended_s)
        if stuck_s < STUCK_S:
            return None
        return f"the checksum thread has ended no call for {stuck_s:.1f} s"
