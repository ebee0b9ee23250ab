"""The verdict on a run of a scenario: counts, seconds to recover, whether it keeps its promise.

Recovery is judged in buckets of half a second, from the first moment of the fault on. A bucket
is good if at least 70 % as many tokens came as on average before the fault, and the 99th
percentile of the waits between two tokens of an answer is at most 1.5 times the worst before.
A wait counts in every bucket that it reaches into, so a stall shows while it lasts. Waits are of
each choice by itself; an answer in one piece has neither waits nor tokens in this sense. Recovered
is the first bucket from which two seconds are good. Pure: knows no processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.clients import Outcome, Trace

BUCKET_S = 0.5
GOOD_BUCKETS = 4
GOODPUT_SHARE = 0.7  # of the mean: in half a second the tokens of few requests vary
GAP_FACTOR = 1.5
GAP_LEAST_S = 0.1  # no wait below it is a disturbance: the machine's own noise
ERROR_CHARACTERS = 160
LEAST_BEFORE = 5  # right answers before the fault, else the run is void


@dataclass(frozen=True, slots=True)
class Moments:
    """Times of the loop's clock: the load began, the fault began, the load ended."""

    began_s: float
    fault_s: float
    over_s: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """`seconds`: None if it never came. `disturbed_s`: of all bad buckets."""

    seconds: float | None
    disturbed_s: float


@dataclass(slots=True)
class Verdict:
    """`counts`: requests by outcome; `kinds`: by kind; `by_grpc`: how many of all came so. `left`:
    blocks that a worker still held after quiet. `errors`: the messages of failed and refused
    requests, and how often."""

    scenario: str
    run: int
    counts: dict[str, int]
    retried: int
    recovery: Recovery
    left: dict[str, int] = field(default_factory=dict)
    by_grpc: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    took_s: float = 0.0  # from the first request to the last block
    errors: dict[str, int] = field(default_factory=dict)
    void: str | None = None
    broken: list[str] = field(default_factory=list)  # promises that were not kept
    notes: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(self.counts.values())


def judge(
    scenario: str,
    run: int,
    traces: Sequence[Trace],
    moments: Moments,
    left: dict[str, int],
    *,
    redundant: bool,
    may_cut: Sequence[str] = (),
) -> Verdict:
    """`may_cut`: the routers that the scenario itself killed."""
    counts = Counter(trace.outcome.value for trace in traces if trace.outcome is not None)
    before = sum(t.outcome is Outcome.RIGHT and t.ended_s < moments.fault_s for t in traces)
    failed = [t for t in traces if t.outcome in (Outcome.FAILED, Outcome.REFUSED)]
    errors = Counter(trace.detail[:ERROR_CHARACTERS] for trace in failed)
    kinds = Counter(trace.kind.value for trace in traces)
    under_way = sum(t.started_s < moments.fault_s < t.ended_s for t in traces)
    found = Verdict(
        scenario=scenario,
        run=run,
        counts={outcome.value: counts[outcome.value] for outcome in Outcome},
        retried=sum(trace.tries > 1 for trace in traces),
        recovery=recovery(traces, moments),
        by_grpc=sum(trace.by_grpc for trace in traces),
        kinds=dict(kinds),
        left=left,
        errors=dict(errors),  # a Counter's own keys would become pairs on the way to JSON
    )
    if before < LEAST_BEFORE or not under_way:
        found.void = f"{before} answers before the fault, {under_way} under way: too little load"
    found.broken = list(_broken(traces, left, redundant, may_cut))
    return found


def _broken(
    traces: Sequence[Trace], left: dict[str, int], redundant: bool, may_cut: Sequence[str]
) -> list[str]:
    never = {Outcome.WRONG, Outcome.HUNG}
    if redundant:
        never |= {Outcome.FAILED, Outcome.REFUSED}
    found = []
    for trace in traces:
        cut = trace.outcome is Outcome.CUT and trace.router not in may_cut
        if trace.outcome is None or trace.outcome in never or cut:
            said = trace.outcome.value if trace.outcome else "never ended"
            found.append(
                f"ask {trace.ask} ({trace.kind.value}) on {trace.router} {said}: {trace.detail}"
            )
    return found + [f"{name} holds {blocks} blocks" for name, blocks in left.items()]


def recovery(traces: Sequence[Trace], moments: Moments) -> Recovery:
    """See the module. The buckets before the fault leave out the load's first second."""
    choices = [choice for trace in traces for choice in trace.answer.choices.values()]
    times = sorted(time for choice in choices for time in choice.token_s)
    gaps = [
        (earlier, later)
        for choice in choices
        for earlier, later in zip(choice.token_s, choice.token_s[1:], strict=False)
    ]
    usual = _buckets(moments.began_s + 1.0, moments.fault_s)
    after = _buckets(moments.fault_s, moments.over_s)
    mean = sum(_tokens(times, bucket) for bucket in usual) / max(1, len(usual))
    most = max((_slowest(gaps, bucket) for bucket in usual), default=0.0)
    most = max(GAP_LEAST_S, GAP_FACTOR * most)
    good = [
        _tokens(times, bucket) >= GOODPUT_SHARE * mean and _slowest(gaps, bucket) <= most
        for bucket in after
    ]
    return Recovery(_first_good(good), BUCKET_S * good.count(False))


def _first_good(good: Sequence[bool]) -> float | None:
    for at in range(len(good) - GOOD_BUCKETS + 1):
        if all(good[at : at + GOOD_BUCKETS]):
            return at * BUCKET_S
    return None


def _buckets(from_s: float, until_s: float) -> list[tuple[float, float]]:
    count = max(0, math.floor((until_s - from_s) / BUCKET_S))
    return [(from_s + at * BUCKET_S, from_s + (at + 1) * BUCKET_S) for at in range(count)]


def _tokens(times: Sequence[float], bucket: tuple[float, float]) -> int:
    return sum(bucket[0] <= time < bucket[1] for time in times)


def _slowest(gaps: Sequence[tuple[float, float]], bucket: tuple[float, float]) -> float:
    """The 99th percentile of the waits that reach into the bucket."""
    reaching = sorted(
        later - earlier for earlier, later in gaps if earlier < bucket[1] and later >= bucket[0]
    )
    return reaching[math.ceil(0.99 * len(reaching)) - 1] if reaching else 0.0
