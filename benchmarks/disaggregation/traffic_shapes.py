"""The traffic of `benchmarks.disaggregation`, and the objectives that its requests are to meet.

Seconds are those of the machine for which the shapes were written, on which a prompt of 1,500
tokens takes 4 s alone and a decode step of four streams 50 ms. `Pace` makes them those of another
machine, so that a fleet there is as loaded and its objectives are as hard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.deploy.bench.answer import Measurement
from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import TraceRequest, in_order

PROMPT_S, STEP_S = 4.0, 0.05  # of the machine of the shapes
LONG_TOKENS = 1500  # of a prompt of a burst
STREAMS = 4
STREAM_PROMPT, STREAM_TOKENS = 60, 160
PERIOD_S, BURST_S = 12.0, 1.5  # the bursts begin so long after the streams
MIXED = "requests={count},rate={rate},prompt=lognormal:400:0.7,output=exponential:40"
MIXED_PER_S = 0.55


@dataclass(frozen=True, slots=True)
class Pace:
    """How many times as long as on the machine of the shapes a prompt and a decode step take."""

    prompt: float
    step: float


@dataclass(frozen=True, slots=True)
class Objective:
    """Bounds of a request's time to first token and of each of its gaps, in seconds."""

    name: str
    ttft_s: float
    gap_s: float

    def at(self, pace: Pace) -> Objective:
        """Return the same objective on another machine."""
        return Objective(self.name, self.ttft_s * pace.prompt, self.gap_s * pace.step)

    def met_by(self, request: Measurement) -> bool:
        longest_s = max(request.gaps_s, default=0.0)
        return not request.error and self.allows(request.ttft_s, longest_s)

    def allows(self, ttft_s: float, longest_gap_s: float) -> bool:
        return ttft_s <= self.ttft_s and longest_gap_s <= self.gap_s

    @property
    def text(self) -> str:
        return f"TTFT {self.ttft_s:.2f} s, every gap {1000 * self.gap_s:.0f} ms"


STRICT = Objective("strict", 5.0, 0.3)
OBJECTIVES = (STRICT, Objective("quick_start", 2.5, 1.0), Objective("patient", 10.0, 0.5))


def streams(seconds: float, pace: Pace) -> list[TraceRequest]:
    """Return four answers of 160 tokens to short prompts in the first second of each period."""
    return [
        TraceRequest(
            pace.prompt * (PERIOD_S * period + number / STREAMS), STREAM_PROMPT, STREAM_TOKENS
        )
        for period in range(periods(seconds))
        for number in range(STREAMS)
    ]


def bursts(seconds: float, pace: Pace) -> list[TraceRequest]:
    """Return the streams, and in each period two prompts of 1,500 tokens at once."""
    long = [
        TraceRequest(pace.prompt * (PERIOD_S * period + BURST_S), LONG_TOKENS, 16)
        for period in range(periods(seconds))
        for _ in range(2)
    ]
    return in_order([*streams(seconds, pace), *long])


def mixed(seconds: float, pace: Pace) -> list[TraceRequest]:
    """Return prompts and answers of all lengths, at random moments."""
    count = max(1, int(MIXED_PER_S * seconds))
    return draw_trace(MIXED.format(count=count, rate=MIXED_PER_S / pace.prompt))


MakeTraffic = Callable[[float, Pace], list[TraceRequest]]
SHAPES: dict[str, MakeTraffic] = {"bursts": bursts, "mixed": mixed}


def periods(seconds: float) -> int:
    """Return how many periods begin within so many seconds, at least one."""
    return max(1, round(seconds / PERIOD_S))


def stream_gaps(requests: list[Measurement]) -> list[float]:
    """Return the gaps of the streams of each period, from when all of them decode."""
    found = []
    ordered = sorted(
        (each for each in requests if each.asked.output_tokens == STREAM_TOKENS),
        key=lambda each: each.asked.arrived_s,
    )
    for first in range(0, len(ordered), STREAMS):
        group = ordered[first : first + STREAMS]
        since_s = max(each.first_s for each in group)
        for each in group:
            at_s = each.first_s
            for gap_s in each.gaps_s:
                if at_s >= since_s:
                    found.append(gap_s)
                at_s += gap_s
    return found
