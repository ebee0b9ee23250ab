"""When a job that died is started again: a pure rule, time passed in.

A job that has run long once is always started again, after a growing pause. One that never
has is given up: at once when it says that its configuration is wrong, else after a few deaths.
The pause starts over after a long run. A worker that ended because nothing went well any more
was up for a while without being of use: its run has to be longer to count.
"""

from __future__ import annotations

from dataclasses import dataclass

CONFIG_EXIT = 78  # EX_CONFIG of sysexits.h: a setting is wrong, starting again cannot help
OTHER_EXIT = 1  # also for what did not start, and may the next time
UNHEALTHY_EXIT = 70  # EX_SOFTWARE: the device failed, or is lost; it may be well after a start


@dataclass(slots=True)
class RestartRule:
    """`died` answers the pause before the next start, in seconds, or None to give up."""

    stable_s: float = 10.0  # a run of this length proves that the job can run
    well_s: float = 120.0  # and one of this length, that ended ill, was well before
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    attempts: int = 5
    proven: bool = False
    _quick_deaths: int = 0

    def runs(self, uptime_s: float) -> None:
        if uptime_s >= self.stable_s:
            self.proven = True

    def died(self, uptime_s: float, exit_code: int) -> float | None:
        self.runs(uptime_s)
        pause_s = self.pause_s(uptime_s, exit_code)
        hopeless = exit_code == CONFIG_EXIT or self._quick_deaths >= self.attempts
        return None if hopeless and not self.proven else pause_s

    def pause_s(self, uptime_s: float, exit_code: int) -> float:
        """As `died`, for what is never given up."""
        if uptime_s >= (self.well_s if exit_code == UNHEALTHY_EXIT else self.stable_s):
            self._quick_deaths = 0
        self._quick_deaths += 1
        doublings = min(self._quick_deaths - 1, 30)
        return min(self.first_pause_s * 2.0**doublings, self.longest_pause_s)
