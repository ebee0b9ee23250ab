"""Stop strings: found across token boundaries and never shown; holds back as little as possible.

The result is the same as for text that comes character by character, however it is split: the stop
string that is complete first ends the output, and of those that end at the same character the one
that begins first. One matcher serves one choice.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """`push` returns the text that may be shown; after a match `stopped` is true, and `push` and
    `flush` return nothing more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        start = self._first_match()
        if start is not None:
            self.stopped = True
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._possible_start()
        shown, self._held = self._held[:keep], self._held[keep:]
        return shown

    def flush(self) -> str:
        """Return the held text at the end of the output."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self) -> int | None:
        best: tuple[int, int] | None = None  # (end, start)
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _possible_start(self) -> int:
        """Return the first index from which the held text may still become a stop string."""
        length = len(self._held)
        for index in range(max(0, length - self._longest + 1), length):
            tail = self._held[index:]
            if any(stop.startswith(tail) for stop in self._stops):
                return index
        return length
