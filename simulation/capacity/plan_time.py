"""When a simulated worker plans the step after the one that runs: as a server does, a little before
the running step should end (engine/scheduling/step_pipeline.py). What arrives later joins the step
after that."""

from __future__ import annotations

from collections import deque

from baton.engine.scheduling.step_pipeline import LEAD_S, expected_step_s


class PlanTime:
    """The last two steps of one worker with chunks, and the last two without."""

    def __init__(self) -> None:
        self._last: dict[bool, deque[tuple[float, int]]] = {
            has_chunks: deque(maxlen=2) for has_chunks in (False, True)
        }

    def record(self, seconds: float, tokens: int, *, has_chunks: bool) -> None:
        """Record a step that has ended."""
        self._last[has_chunks].append((seconds, tokens))

    def due_s(self, started_s: float, tokens: int, *, has_chunks: bool) -> float:
        """Return when the step after one that began at `started_s` is planned, unless that one has
        ended before."""
        last = tuple(self._last[has_chunks])
        return started_s + expected_step_s(last, tokens, has_chunks=has_chunks) - LEAD_S
