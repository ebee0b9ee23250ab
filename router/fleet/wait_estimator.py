"""How long a request that comes now would be on a worker, from the worker's recent completions.

    expected = (open requests there + placed since + 1 + half of those that it computes at once)
               * seconds per completion - time since the report

Half, because requests that are computed at once may have begun together, and then end together:
the new request's position is between one that is served at each completion and one that waits for
a whole round. The estimate exists only while requests wait: without a queue the rate of
completions is that of the arrivals, and says nothing about what the worker could do. The rate of
one queue is kept for the next one, until that has completions of its own.

Completions are those of whole requests, from any router; a request that was cancelled or failed
has freed memory, but does not count. Pure: time is given. Owned by the worker's link.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.proto import worker_pb2

WINDOW_COMPLETIONS = 16  # that the rate is taken from, or two rounds if those are more
MIN_COMPLETIONS = 4  # or a quarter of a round
ESTIMATE_VALID_S = 10.0


@dataclass(frozen=True, slots=True)
class _Completions:
    """All completions so far, taken when a queue formed and at each report of new ones."""

    at_s: float
    count: int


class WaitEstimator:
    """An estimator of waits for one boot of one worker."""

    def __init__(self) -> None:
        self._samples: deque[_Completions] = deque()  # empty without a queue
        self._load = worker_pb2.Load()
        self._load_s = 0.0
        self._seconds_per_completion = 0.0
        self._valid_until_s = 0.0

    def report(self, load: worker_pb2.Load, now_s: float) -> None:
        """Take a load report of the worker."""
        if load.completed_requests < self._load.completed_requests:  # the worker was restarted
            self._valid_until_s = 0.0
            self._samples.clear()
        self._load, self._load_s = load, now_s
        if load.waiting:
            self._add_sample(load.completed_requests, now_s)
        else:
            self._samples.clear()

    def expected_s(self, placed: int, now_s: float) -> float:
        """Return the time to the end of one more request, where `placed` were sent since the last
        report; 0 without a queue, or with too few completions since the queue formed."""
        end = self.expected_end(placed)
        return 0.0 if end is None or now_s > end[1] else max(0.0, end[0] - now_s)

    def expected_end(self, placed: int) -> tuple[float, float] | None:
        """Return when one more request would end, and until when that estimate is valid; None
        without a queue. Changes only with a report and with `placed`."""
        load = self._load
        if not load.waiting:
            return None
        position = load.open_requests + placed + 1
        end_s = self._load_s + (position + load.active_requests / 2) * self._seconds_per_completion
        return end_s, self._valid_until_s

    def _add_sample(self, completed: int, now_s: float) -> None:
        """Measure from one report of new completions to another: of requests that end together,
        none counts that ended before the window."""
        samples, active = self._samples, self._load.active_requests
        if not samples or completed > samples[-1].count:
            samples.append(_Completions(now_s, completed))
        window = max(WINDOW_COMPLETIONS, 2 * active)
        while len(samples) > 2 and completed - samples[1].count >= window:
            samples.popleft()
        completions = samples[-1].count - samples[0].count
        if completions >= max(MIN_COMPLETIONS, active // 4):
            self._seconds_per_completion = (samples[-1].at_s - samples[0].at_s) / completions
            self._valid_until_s = now_s + ESTIMATE_VALID_S
