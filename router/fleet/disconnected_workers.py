"""The decode workers that are not linked just now, as large as they were when they last were.

A request that only one of them could hold is not too large for this fleet: it waits, or is told
to ask again. Who has left is remembered for as long as a worker may take to come back. Knows
sizes and no links. Pure: time is given. Owned by the fleet.
"""

from __future__ import annotations

from baton.router.fleet.worker_view import Size


class Absent:
    """By worker id, each for `keep_s` from the last word of it."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._sizes: dict[str, tuple[Size, float]] = {}  # and until when it is remembered

    def announced(self, worker_id: str, role: str, now_s: float) -> None:
        """The registry names it, and it is not linked yet. One that is new here may be of any
        size."""
        known = self._sizes.pop(worker_id, (Size(), 0.0))[0]
        if role == "decode":
            self.left(worker_id, known, now_s)

    def left(self, worker_id: str, size: Size, now_s: float) -> None:
        """The fleet has let it go."""
        self._sizes[worker_id] = size, now_s + self._keep_s

    def change_s(self) -> float:
        """Return when the next one is forgotten."""
        return min((until_s for _, until_s in self._sizes.values()), default=float("inf"))

    def sizes(self, now_s: float) -> dict[str, Size]:
        """What is remembered, of workers too that are back."""
        self._sizes = {name: kept for name, kept in self._sizes.items() if now_s < kept[1]}
        return {name: size for name, (size, _) in self._sizes.items()}
