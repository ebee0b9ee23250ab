"""The in-flight window of a handoff: how many READs, and how many bytes, may be under way.

Pure bookkeeping: it starts nothing and waits for nothing. The reader that owns it asks before
each READ and tells it after.
"""

from __future__ import annotations


class Window:
    """A READ is admitted while both limits hold. A lone READ larger than the byte limit is
    admitted too, else it could never go."""

    def __init__(self, max_reads: int, max_bytes: int) -> None:
        if max_reads < 1 or max_bytes < 1:
            raise ValueError(f"a window of {max_reads} READs and {max_bytes} bytes is empty")
        self._max_reads = max_reads
        self._max_bytes = max_bytes
        self.reads = 0  # in flight
        self.bytes = 0

    def admits(self, size: int) -> bool:
        """Whether a READ of `size` bytes may start now."""
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
        """A READ of `size` bytes has landed or failed."""
        if self.reads == 0 or size > self.bytes:
            raise ValueError(f"no READ of {size} bytes is in flight")
        self.reads -= 1
        self.bytes -= size
