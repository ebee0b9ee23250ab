"""When a job that died is started again: a pure rule, time passed in.

A job that has run long once is always started again, after a growing pause. One that never
has is given up: at once when it says that its configuration is wrong, else after a few deaths.
"""

from __future__ import annotations

from dataclasses import dataclass

CONFIG_EXIT = 78  # EX_CONFIG of sysexits.h: a setting is wrong, starting again cannot help


@dataclass(slots=True)
class RestartRule:
    """`died` answers the pause before the next start, in seconds, or None to give up."""

    stable_s: float = 10.0  # a run of this length proves that the job can run
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    attempts: int = 5
    _proven: bool = False
    _quick_deaths: int = 0

    def died(self, uptime_s: float, exit_code: int) -> float | None:
        if uptime_s >= self.stable_s:
            self._proven = True
            self._quick_deaths = 0
        self._quick_deaths += 1
        hopeless = exit_code == CONFIG_EXIT or self._quick_deaths >= self.attempts
        if hopeless and not self._proven:
            return None
        doublings = min(self._quick_deaths - 1, 30)
        return min(self.first_pause_s * 2.0**doublings, self.longest_pause_s)
