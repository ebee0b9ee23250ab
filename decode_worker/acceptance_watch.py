"""The watch over accepted proposals, which reports a low share that lasts. Pure."""

from __future__ import annotations

WINDOW_PROPOSALS = 256
LOW_SHARE = 0.05


class AcceptanceWatch:
    """Counts proposals in windows. Of consecutive windows with a low share, it reports the second,
    fourth, eighth and so on."""

    def __init__(self) -> None:
        self._proposed = self._accepted = 0  # of the window
        self._low_windows = 0  # in a row

    def add(self, *, proposed: int, accepted: int) -> float | None:
        """Count proposals; return the accepted share of a window that should be reported."""
        self._proposed += proposed
        self._accepted += accepted
        if self._proposed < WINDOW_PROPOSALS:
            return None
        share = self._accepted / self._proposed
        self._proposed = self._accepted = 0
        self._low_windows = self._low_windows + 1 if share < LOW_SHARE else 0
        reported = self._low_windows >= 2 and self._low_windows.bit_count() == 1
        return share if reported else None
