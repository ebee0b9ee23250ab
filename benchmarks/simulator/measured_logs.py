"""Logs of requests that other systems measured, and a timing model fitted to them.

The first line of a log is a Python list of dicts with prompt_len, output_len, issue_time,
first_token_time, complete_time (seconds); its name ends with "-<requests>-<rate>.exp" (DistServe's
simulator, Apache-2.0). Read with ast.literal_eval: nothing of it is run. Pure but for the file.

A log names no step. But a prompt that met no other one took a request's host time and one step with
a prompt; and from its first token to its last a request sat through its own steps, whose sequences
and context are those of the requests that ran beside it, and through what each request that joined
them held up: its KV's transfer, or its prompt on an engine that does both. All of that is linear in
the coefficients of a timing model, so one fit of non-negative least squares finds them. Requests
beside which KV ran short are left out: they waited, and a log does not say for how long.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baton.planner.timing_fit import non_negative_least_squares
from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    HostTiming,
    StepTiming,
    TimingModel,
    TransferTiming,
)
from baton.planner.traces import TraceRequest, in_order
from baton.runtime.worker.attention_pairs import causal_pairs

WARM_UP = 0.1  # share of a log's requests: their first steps took up to 0.5 s
ROOM = 0.85  # share of the pool up to which no sequence waits
SPREAD_S = 0.1  # errors of longer times grow with the root of the time, in units of this
_Sample = tuple[tuple[float, ...], float]  # amounts, and their seconds
NONE: _Sample = ((), 0.0)


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

    def most_tokens(self) -> int:
        """Return the most tokens that requests with a first token held at once, if each got its
        tokens at an even pace."""
        columns = _Columns(self)
        return round(max(columns.held_at(time_s)[1] for time_s in columns.first))


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


class _Columns:
    """A log as one array for each field, with which all of its requests are compared at once."""

    def __init__(self, log: RateLog) -> None:
        rows = [
            (each.prompt_tokens, each.output_tokens, each.issued_s, each.first_s, each.end_s)
            for each in log.requests
        ]
        table = np.array(rows, dtype=np.float64)
        self.prompt, self.output, self.issued, self.first, self.end = table.T

    def lengths_at(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the tokens of each request at its time of `times_s`. [requests] seconds."""
        spans_s = np.maximum(self.end - self.first, 1e-9)
        made = np.clip((times_s - self.first) / spans_s, 0, 1) * (self.output - 1)
        return np.asarray(self.prompt + 1 + made, dtype=np.float64)

    def held_at(self, time_s: float) -> tuple[float, float]:
        """Return how many requests have a first token and not the last, and their tokens."""
        running = (self.first <= time_s) & (self.end > time_s)
        lengths = self.lengths_at(np.full(len(running), time_s))
        return float(running.sum()), float(lengths[running].sum())


def fit_logs(
    name: str,
    kv_bytes: float,
    logs: Iterable[RateLog],
    pool_tokens: int,
    *,
    together: bool,
) -> TimingModel:
    """Fit a timing model. `kv_bytes` is of one token, `pool_tokens` the room of the engine that
    decodes; `together`: that engine computes prompts too, and no KV is moved."""
    rows, seconds = list[tuple[float, ...]](), list[float]()
    for log in logs:
        columns = _Columns(log)
        for index in range(int(WARM_UP * len(log.requests)), len(log.requests)):
            for row, took_s in (
                _first_token_row(columns, index, together=together),
                _span_row(columns, index, ROOM * pool_tokens, together=together),
            ):
                if took_s > 0:
                    rows.append(row)
                    seconds.append(took_s)
    table, took = np.array(rows), np.array(seconds)
    spread = np.sqrt(SPREAD_S * took)
    solved = non_negative_least_squares(table / spread[:, None], took / spread)
    own, chunk, token, pair, step, sequence, context, copy, copied = map(float, solved)
    return TimingModel(
        name,
        kv_bytes,
        ChunkTiming(chunk, token),
        StepTiming(step, sequence),
        AttentionTiming(pair, context),
        TransferTiming(copy, copied / kv_bytes),
        HostTiming(own),
    )


def _first_token_row(columns: _Columns, index: int, *, together: bool) -> _Sample:
    """Return the row of a request before whose first token no other prompt waited or came. On an
    engine of its own its host time is in the fixed time of a step: no log tells them apart."""
    issued_s, first_s = columns.issued[index], columns.first[index]
    apart = (columns.first <= issued_s) | (columns.issued >= first_s)
    if apart.sum() < len(apart) - 1:
        return NONE
    prompt, half = columns.prompt[index], (0.0, 0.0, 0.0)
    if together:  # it waits for the step under way
        sequences, context = columns.held_at(issued_s)
        half = (0.5 * bool(sequences), 0.5 * sequences, 0.5 * context)
    row = (float(together), 1.0, prompt, causal_pairs(0, int(prompt)), *half, 0.0, 0.0)
    return row, float(first_s - issued_s)


def _span_row(columns: _Columns, index: int, room: float, *, together: bool) -> _Sample:
    """Return the row of a request from its first token to its last, if KV was not short then."""
    first_s, end_s = columns.first[index], columns.end[index]
    steps, span_s = columns.output[index] - 1, end_s - first_s
    if steps < 1 or span_s <= 0:
        return NONE
    begin, stop = np.maximum(columns.first, first_s), np.minimum(columns.end, end_s)
    beside = np.clip(stop - begin, 0, None) / span_s  # share of the span, of each request
    context = float((beside * columns.lengths_at((begin + stop) / 2)).sum())
    held = (columns.held_at(time_s)[1] for time_s in (first_s, end_s - 1e-6))
    if max(context, *held) > room:
        return NONE
    joined = (columns.first > first_s) & (columns.first < end_s)
    joined[index] = not together  # its own KV is moved after its first token
    prompts, count = columns.prompt[joined], float(joined.sum())
    if together:
        held_up = (0.0, count, prompts.sum(), (prompts * (prompts + 1) / 2).sum())
        moved = (0.0, 0.0)
    else:
        held_up, moved = (0.0, 0.0, 0.0, 0.0), (count, prompts.sum())
        steps += 0.5  # it waits for the step under way
    own = (steps, steps * beside.sum(), steps * context)
    return (*held_up, *own, *moved), float(span_s)
