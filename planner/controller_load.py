"""The load of a fleet, from what its workers report: rates of a recent window, and speeds.

    FleetSample ─ every second ─▶ LoadWindow ─▶ FleetLoad: traffic, backlog, speeds

Counters are of one boot of a worker; the window adds the increments of each boot, so a restart or
a change of roles counts as nothing. Speeds are learned from the same reports: a prefill worker's
from tokens and busy seconds, a decode step's by a fit over steps of unlike batches. While a decode
worker computes prompts, its counters are of all its steps: then the steps without prompt tokens in
its report count. Pure: time is given. Owned by the controller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from baton.planner.step_samples import StepLimits, StepSample
from baton.planner.timing_fit import non_negative_least_squares

WorkerRole = Literal["prefill", "decode"]
WorkerState = Literal["ready", "not ready", "draining", "unreachable", "no counters"]
WINDOW_S = 20.0  # of arrivals
RISE_S = 8.0  # of arrivals, where they become more
SPEED_S = 120.0  # of busy time, over which speeds are averaged
MIN_BUSY_S = 0.2  # before a speed is known
MIN_BUCKET_STEPS = 3
BUCKET_SAMPLES = 40  # of decode steps with about the same batch
MIN_STEP_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class RouterSample:
    """A router, as its workers know it: requests that wait on it for one of them, and a counter of
    those that it refused because workers had no room. The id is of one start of it."""

    router_id: str
    waiting: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """The report of one boot of a worker. Without an answer, or from a version with other counters,
    all numbers are 0."""

    worker_id: str
    boot_id: str
    role: WorkerRole
    state: WorkerState
    waiting: int = 0  # requests: for credit on a decode worker, for blocks on a prefill worker
    running: int = 0  # sequences in the batch, or prompts being computed
    queued_tokens: int = 0  # prompt tokens still to be computed, the rest of chunks included
    kv_used_tokens: int = 0  # of the pool: KV that requests hold
    kv_tokens: int = 0  # of the pool
    requests: int = 0  # counter: received
    ended_requests: int = 0  # counter
    ended_output_tokens: int = 0  # counter: of these
    prompt_tokens: int = 0  # counter: computed
    output_tokens: int = 0  # counter: drawn in steps
    busy_s: float = 0.0  # counter: seconds of steps
    steps: int = 0  # counter
    block_tokens: int = 0
    recent_steps: tuple[StepSample, ...] = ()
    verifying_steps: int = 0  # counter: steps that verified proposals, which no sample is of
    narrow_kv: bool = False  # KV in 8 bits
    step_limits: StepLimits | None = None  # None: a version that does not report them
    routers: tuple[RouterSample, ...] = ()  # that it is linked to


@dataclass(frozen=True, slots=True)
class FleetSample:
    """All registered workers at one time. `at_s`: when the oldest of the answers was taken."""

    at_s: float
    workers: tuple[WorkerSample, ...]

    def of(self, role: WorkerRole, *states: WorkerState) -> list[WorkerSample]:
        """Return the workers of a role in one of these states."""
        return [each for each in self.workers if each.role == role and each.state in states]

    def routers(self) -> dict[str, RouterSample]:
        """Return each router by id: of the workers' answers the one with most refusals."""
        reported = [each for worker in self.workers for each in worker.routers]
        ordered = sorted(reported, key=lambda each: (each.refused, each.waiting))
        return {each.router_id: each for each in ordered}


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """Seconds of a decode step: fixed_s + per_sequence_s * B + per_context_token_s * K."""

    fixed_s: float
    per_sequence_s: float
    per_context_token_s: float


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The traffic of the window, the work that waits now, and the workers' speeds. `prefill_rate`
    is prompt tokens a second of one busy prefill worker; None: none has computed yet. `step` is
    None before decode steps were seen."""

    requests_per_s: float
    prompt_tokens_per_s: float  # that prefill workers have to compute
    tokens_per_request: float  # of these
    output_per_request: float
    context_tokens: float  # of a running sequence
    backlog_tokens: float  # to be computed: queued, and of requests that wait
    waiting: int  # for credit, or on a router
    running: int
    kv_tokens: int  # of one decode worker's pool
    max_sequences: int | None  # of one decode worker's batch; None: no worker reports it
    prefill_rate: float | None
    step: StepSpeed | None
    step_s: float  # mean of the window; 0: no step

    @property
    def idle(self) -> bool:
        return not (self.requests_per_s or self.backlog_tokens or self.running or self.waiting)


class LoadWindow:
    """Keeps the samples of the last WINDOW_S, and what was learned of the speeds."""

    def __init__(self) -> None:
        self._samples: deque[FleetSample] = deque()
        self._prefill: deque[tuple[float, float]] = deque()  # tokens, busy seconds
        self._steps: dict[int, deque[tuple[float, float, float]]] = {}  # B, K, seconds by batch
        self._output_per_request = 0.0
        self._context_tokens = 0.0
        self._tokens_per_request = 0.0
        self._offered_tokens = 0.0  # since the last request

    @property
    def span_s(self) -> float:
        """Return the seconds between the first and the last sample."""
        return self._samples[-1].at_s - self._samples[0].at_s if self._samples else 0.0

    def gap_s(self, sample: FleetSample) -> float:
        """Return the seconds from the last sample to this one; 0 for the first."""
        return sample.at_s - self._samples[-1].at_s if self._samples else 0.0

    def add(self, sample: FleetSample) -> None:
        """Take a sample; one that is not newer than the last one is dropped."""
        if self._samples and sample.at_s <= self._samples[-1].at_s:
            return
        if self._samples:
            self._learn(self._samples[-1], sample)
        self._samples.append(sample)
        while self._samples[-1].at_s - self._samples[0].at_s > WINDOW_S:
            self._samples.popleft()

    def clear(self) -> None:
        """Forget the samples and keep the speeds: there was a gap."""
        self._samples.clear()

    def load(self) -> FleetLoad:
        """Return the load at the last sample. At least two samples are there."""
        last = self._samples[-1]
        prefill, decode = (last.of(role, "ready", "draining") for role in ("prefill", "decode"))
        waiting = sum(each.waiting for each in decode)
        waiting += sum(each.waiting for each in last.routers().values())
        queued = sum(each.queued_tokens for each in prefill)
        steps = self._sum("decode", lambda each: each.steps)
        busy_s = self._sum("decode", lambda each: each.busy_s)
        batches = [e.step_limits.max_sequences for e in decode if e.step_limits is not None]
        requests_per_s = self._requests_per_s()
        return FleetLoad(
            requests_per_s=requests_per_s,
            prompt_tokens_per_s=requests_per_s * self._tokens_per_request,
            tokens_per_request=self._tokens_per_request,
            output_per_request=self._output_per_request,
            context_tokens=self._context_tokens,
            backlog_tokens=queued + waiting * self._tokens_per_request,
            waiting=waiting,
            running=sum(each.running for each in decode),
            kv_tokens=min((each.kv_tokens for each in decode), default=0),
            max_sequences=min(batches, default=None),
            prefill_rate=self._prefill_rate(),
            step=fit_steps([each for bucket in self._steps.values() for each in bucket]),
            step_s=busy_s / steps if steps else 0.0,
        )

    def _requests_per_s(self) -> float:
        """Return the rate of the window, or that of its end where it is surely higher: by more
        than the deviation of a Poisson process."""
        received = self._offered()
        first_s = self._samples[-1].at_s - RISE_S
        recent = [each for each in self._samples if each.at_s >= first_s]
        rate = received / self.span_s
        if len(recent) < 2:
            return rate
        lately = self._offered(recent)
        span_s = recent[-1].at_s - recent[0].at_s
        return max(rate, (lately - math.sqrt(lately)) / span_s)

    def _offered(self, samples: Sequence[FleetSample] | None = None) -> float:
        """Return the requests that workers received, and those that routers refused because workers
        had no room, at most as many: a refused client asks again, and each attempt counts."""
        chosen = list(self._samples) if samples is None else samples
        received = self._sum("decode", lambda each: each.requests, chosen)
        refused = sum(_refused(old, new) for old, new in pairwise(chosen))
        return received + min(received, refused)

    def _sum(
        self,
        role: WorkerRole,
        count: Callable[[WorkerSample], float],
        samples: Sequence[FleetSample] | None = None,
    ) -> float:
        """Add the increments of a counter between all samples, or between these."""
        chosen = list(self._samples) if samples is None else samples
        return sum(_increase(old, new, role, count) for old, new in pairwise(chosen))

    def _learn(self, old: FleetSample, new: FleetSample) -> None:
        busy_s = _increase(old, new, "prefill", lambda each: each.busy_s)
        computed = _increase(old, new, "prefill", lambda each: each.prompt_tokens)
        if busy_s > 0:
            self._prefill.append((computed, busy_s))
        while sum(busy for _, busy in self._prefill) > SPEED_S:
            self._prefill.popleft()
        for before, after in _pairs(old, new, "decode"):
            self._learn_steps(before, after)
        ended = _increase(old, new, "decode", lambda each: each.ended_requests)
        output = _increase(old, new, "decode", lambda each: each.ended_output_tokens)
        self._output_per_request = _mixed(self._output_per_request, output, ended)
        requests = _increase(old, new, "decode", lambda each: each.requests)
        queued = sum(b.queued_tokens - a.queued_tokens for a, b in _pairs(old, new, "prefill"))
        self._offered_tokens += computed + queued
        if requests > 0:
            offered = max(0.0, self._offered_tokens)
            self._tokens_per_request = _mixed(self._tokens_per_request, offered, requests)
            self._offered_tokens = 0.0

    def _learn_steps(self, before: WorkerSample, after: WorkerSample) -> None:
        computes_prompts = after.prompt_tokens > before.prompt_tokens
        step = (_mean_reported if computes_prompts else _mean_counted)(before, after)
        if step is None:
            return
        batch, context, _ = step
        bucket = self._steps.setdefault(int(4 * np.log2(batch)), deque(maxlen=BUCKET_SAMPLES))
        bucket.append(step)
        self._context_tokens = _mixed(self._context_tokens, context, batch)

    def _prefill_rate(self) -> float | None:
        busy_s = sum(busy for _, busy in self._prefill)
        tokens = sum(tokens for tokens, _ in self._prefill)
        return tokens / busy_s if busy_s >= MIN_BUSY_S and tokens else None


def _mean_counted(before: WorkerSample, after: WorkerSample) -> tuple[float, float, float] | None:
    """Return batch, context tokens and seconds of the mean step between two reports of a worker;
    None: there were too few."""
    steps = after.steps - before.steps
    rows = after.output_tokens - before.output_tokens
    if steps < MIN_BUCKET_STEPS or rows <= 0:
        return None
    context = (before.kv_used_tokens + after.kv_used_tokens) / 2
    return rows / steps, context, (after.busy_s - before.busy_s) / steps


def _mean_reported(before: WorkerSample, after: WorkerSample) -> tuple[float, float, float] | None:
    """Return the same three of the steps without prompt tokens that are new in the later report;
    None: there is none."""
    known = set(before.recent_steps)
    rows = [
        (each.work.sequences, each.work.context_tokens, each.seconds)
        for each in after.recent_steps
        if each not in known and each.work.sequences and not each.work.prompt_tokens
    ]
    if not rows:
        return None
    batch, context, seconds = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    return batch, context, seconds


def fit_steps(samples: Sequence[tuple[float, float, float]]) -> StepSpeed | None:
    """Fit (batch, context tokens, seconds) of steps by the least sum of squared relative errors;
    None with too few of them."""
    if len(samples) < MIN_STEP_SAMPLES:
        return None
    batch, context, seconds = np.asarray(samples, dtype=np.float64).T
    rows = np.stack([np.ones_like(batch), batch, context], axis=1) / seconds[:, None]
    solved = non_negative_least_squares(rows, np.ones_like(seconds))
    fixed_s, per_sequence_s, per_context_token_s = (float(each) for each in solved)
    return StepSpeed(fixed_s, per_sequence_s, per_context_token_s)


def _pairs(
    old: FleetSample, new: FleetSample, role: WorkerRole
) -> Iterable[tuple[WorkerSample, WorkerSample]]:
    """Yield the two reports of each boot of a role that answered both times."""
    before = {each.boot_id: each for each in old.of(role, "ready", "not ready", "draining")}
    for each in new.of(role, "ready", "not ready", "draining"):
        if each.boot_id in before:
            yield before[each.boot_id], each


def _refused(old: FleetSample, new: FleetSample) -> int:
    """Return how many requests the routers have refused that both samples know."""
    before = old.routers()
    return sum(
        max(0, each.refused - before[each.router_id].refused)
        for each in new.routers().values()
        if each.router_id in before
    )


def _increase(
    old: FleetSample,
    new: FleetSample,
    role: WorkerRole,
    count: Callable[[WorkerSample], float],
) -> float:
    return sum(max(0.0, count(after) - count(before)) for before, after in _pairs(old, new, role))


_RECENT = 120.0  # events that a mean remembers


def _mixed(mean: float, total: float, count: float) -> float:
    """Return the mean of the events before and of `count` new ones of `total` together."""
    if count <= 0:
        return mean
    if not mean:
        return total / count
    weight = count / (count + _RECENT)
    return (1 - weight) * mean + weight * total / count
