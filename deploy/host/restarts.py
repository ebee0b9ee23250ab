"""Decides when a job that ended is restarted: a pure rule, time passed in.

A job that has run long once is always restarted, after a growing pause. A job that never has is
given up: at once if it reports a wrong configuration, else after a few attempts. A long run
resets the pause. A worker that ended because all its steps failed was up without serving, so its
run must be longer to count.
"""

from __future__ import annotations

from dataclasses import dataclass

CONFIG_EXIT = 78  # EX_CONFIG of sysexits.h: a setting is wrong, a restart cannot help
OTHER_EXIT = 1  # also for a job that did not start and may the next time
EARLY_STARTS = 3  # of one job before it was ready; one more ends a start
UNHEALTHY_EXIT = 70  # EX_SOFTWARE: the device failed or is lost; a restart may help


@dataclass(slots=True)
class RestartRule:
    """Counts the ends of one job. `record_end` returns the pause before the next start in seconds,
    or None to give up."""

    stable_s: float = 10.0  # a run of this length proves that the job can run
    healthy_s: float = 120.0  # a run of this length that ended unhealthy was healthy before
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    attempts: int = 5
    proven: bool = False
    _short_runs: int = 0

    def record_run(self, uptime_s: float) -> None:
        if uptime_s >= self.stable_s:
            self.proven = True

    def record_end(self, uptime_s: float, exit_code: int) -> float | None:
        self.record_run(uptime_s)
        pause_s = self.pause_s(uptime_s, exit_code)
        futile = exit_code == CONFIG_EXIT or self._short_runs >= self.attempts
        return None if futile and not self.proven else pause_s

    def pause_s(self, uptime_s: float, exit_code: int) -> float:
        """Same as `record_end`, for a job that is never given up."""
        if uptime_s >= (self.healthy_s if exit_code == UNHEALTHY_EXIT else self.stable_s):
            self._short_runs = 0
        self._short_runs += 1
        doublings = min(self._short_runs - 1, 30)
        return min(self.first_pause_s * 2.0**doublings, self.longest_pause_s)
