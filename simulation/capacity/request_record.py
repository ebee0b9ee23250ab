"""The measurements of a simulation: each request's times, and all gaps between tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from baton.planner.traces import TraceRequest


@dataclass(slots=True)
class RequestRecord:
    """One request of the trace. Times are seconds of the trace; -1: it has not happened."""

    request: TraceRequest
    first_s: float = -1.0
    last_s: float = -1.0
    end_s: float = -1.0
    tokens: int = 0
    longest_gap_s: float = 0.0
    cached_tokens: int = 0  # on the worker that computed the prompt
    refused: str | None = None  # the code of the error

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.request.arrived_s

    @property
    def mean_gap_s(self) -> float:
        """Return the mean time between two tokens; 0 with a single token."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


class GapLog:
    """The gaps between tokens, each with the number of tokens that had it."""

    def __init__(self) -> None:
        self.seconds = array("d")
        self.counts = array("q")

    def token(self, record: RequestRecord, now_s: float, gap_s: float, more: int) -> None:
        """Record a token that came `gap_s` before `more` others, the last of them at `now_s`."""
        if record.tokens == 0:
            record.first_s = record.last_s = now_s
            record.tokens = 1
            return
        own_s = now_s - more * gap_s - record.last_s
        self.seconds.append(own_s)
        self.counts.append(1)
        if more:
            self.seconds.append(gap_s)
            self.counts.append(more)
        record.longest_gap_s = max(record.longest_gap_s, own_s, gap_s if more else 0.0)
        record.last_s = now_s
        record.tokens += 1 + more
