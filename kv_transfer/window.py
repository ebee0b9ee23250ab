"""The window of a handoff: the limits on READs and bytes in flight.

It is pure bookkeeping: it starts nothing and waits for nothing. The reader owns it, and reports
the start and the end of each READ.
"""

from __future__ import annotations


class Window:
    """The READs in flight of one handoff. A READ is admitted if both limits hold. A READ that
    exceeds the byte limit is admitted alone, since it could never start otherwise."""

    def __init__(self, max_reads: int, max_bytes: int) -> None:
        if max_reads < 1 or max_bytes < 1:
            raise ValueError(f"a window of {max_reads} READs and {max_bytes} bytes is empty")
        self._max_reads = max_reads
        self._max_bytes = max_bytes
        self.reads = 0  # in flight
        self.bytes = 0

    def admits(self, size: int) -> bool:
        """Return whether a READ of `size` bytes may start now."""
        if self.reads == 0:
            return True
        return self.reads < self._max_reads and self.bytes + size <= self._max_bytes

    def started(self, size: int) -> None:
        """Count a READ; raises ValueError if the window does not admit it."""
        if not self.admits(size):
            raise ValueError(f"a READ of {size} bytes is outside the window")
        self.reads += 1
        self.bytes += size

    def ended(self, size: int) -> None:
        """Record that a READ of `size` bytes has landed or failed."""
        if self.reads == 0 or size > self.bytes:
            raise ValueError(f"no READ of {size} bytes is in flight")
        self.reads -= 1
        self.bytes -= size
