"""Logs of requests that other systems measured, as samples for a timing model and as traffic.

The first line of a log is a Python list of dicts with prompt_len, output_len, issue_time,
first_token_time, complete_time (seconds); its name ends with "-<requests>-<rate>.exp" (DistServe's
simulator, Apache-2.0). Read with ast.literal_eval: nothing of it is run. Pure but for the file.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.planner.timing_fit import TimingSample
from baton.planner.timing_model import causal_pairs
from baton.planner.traces import TraceRequest, in_order

MIN_OUTPUT = 8  # tokens, for a mean time between them to say much
EDGE = 0.1  # of a log's requests at each end, where fewer run than in the middle


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """Times in seconds of the log's clock."""

    prompt_tokens: int
    output_tokens: int
    issued_s: float
    first_s: float
    end_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.issued_s

    @property
    def mean_gap_s(self) -> float:
        return (self.end_s - self.first_s) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RateLog:
    """The requests of one run at one rate, in the order of their issue."""

    rate: float
    requests: tuple[LoggedRequest, ...]

    def traffic(self) -> list[TraceRequest]:
        """Return the requests as traffic."""
        return in_order(
            TraceRequest(each.issued_s, each.prompt_tokens, each.output_tokens)
            for each in self.requests
        )


def read_log(path: Path) -> RateLog:
    """Return a log. Raises ValueError if it is none."""
    with path.open() as file:
        found = ast.literal_eval(file.readline())
    requests = [
        LoggedRequest(
            int(each["prompt_len"]),
            int(each["output_len"]),
            float(each["issue_time"]),
            float(each["first_token_time"]),
            float(each["complete_time"]),
        )
        for each in found
    ]
    requests.sort(key=lambda each: each.issued_s)
    return RateLog(float(path.stem.rpartition("-")[2]), tuple(requests))


def read_logs(folder: Path, system: str) -> list[RateLog]:
    """Return the logs of a system, the lowest rate first."""
    logs = [read_log(path) for path in folder.glob(f"{system}-[0-9]*.exp")]
    return sorted(logs, key=lambda each: each.rate)


def chunk_samples(log: RateLog) -> list[TimingSample]:
    """Return the TTFTs of requests before whose first token no other prompt waited or came."""
    found = []
    for index, each in enumerate(log.requests):
        others = log.requests[:index] + log.requests[index + 1 :]
        alone = all(o.first_s <= each.issued_s or o.issued_s >= each.first_s for o in others)
        if alone:
            amounts = (float(each.prompt_tokens), float(causal_pairs(0, each.prompt_tokens)))
            found.append(TimingSample("chunk", amounts, each.ttft_s))
    return found


def step_samples(
    log: RateLog, prompt_s: Callable[[int], float] = lambda tokens: 0.0
) -> list[TimingSample]:
    """Return each request's mean time between tokens, with the mean number of sequences that
    decoded beside it, itself included, and the context that they read together. `prompt_s` is the
    time for which a prompt of so many tokens holds up those that decode on the same engine."""
    found = []
    for each in middle(log.requests):
        span_s = each.end_s - each.first_s
        if each.output_tokens < MIN_OUTPUT or span_s <= 0:
            continue
        rows = context = held_up_s = 0.0
        for other in log.requests:
            beside_s = min(each.end_s, other.end_s) - max(each.first_s, other.first_s)
            if beside_s > 0:
                rows += beside_s / span_s
                length = other.prompt_tokens + other.output_tokens / 2
                context += beside_s / span_s * length
            if other is not each and each.first_s < other.first_s < each.end_s:
                held_up_s += prompt_s(other.prompt_tokens)
        seconds = (span_s - held_up_s) / (each.output_tokens - 1)
        if seconds > 0:
            found.append(TimingSample("step", (rows, context), seconds))
    return found


def middle(requests: Sequence[LoggedRequest]) -> Sequence[LoggedRequest]:
    """Return the requests without those at both ends."""
    edge = int(EDGE * len(requests))
    return requests[edge : len(requests) - edge]
