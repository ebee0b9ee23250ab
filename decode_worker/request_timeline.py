"""Where the time of a request goes on a decode worker, as its router receives it.

    receipt ─ credit wait ─ connect ─ open ─ [prefill worker] ─ first token   with the first output
                        └─ step wait ─ chunk ... ─ first token
    first output ─ fetch ─ verify ─ decode queue ─ step                       with the second
    second output ─ decode ─ credit wait ─ step wait ─ chunk ...              after a preemption

What a fetch transferred before the first token was hidden behind the prefill: it takes no phase of
the second part, and stands in `FetchTimes`. Pure; times are seconds of one clock, which is given.
The request owns its timeline.
"""

from __future__ import annotations

from baton.kv_transfer.fetch_report import FetchReport
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime.telemetry import timeline
from baton.runtime.telemetry.timeline import MAX_OFFERS, Timeline, micros


class RequestTimeline:
    """`due`: a coming output has to carry the phases since the last one that did. The second is of
    the choice that had the first. `step_s` are the times of the step that is being committed."""

    __slots__ = ("_arrived_s", "_choice", "_fetch", "_part", "_preempted", "due", "reports")

    def __init__(self, arrived_s: float) -> None:
        self._arrived_s = arrived_s
        self._part = Timeline(arrived_s)
        self._fetch: worker_pb2.FetchTimes | None = None
        self._choice = 0
        self._preempted = False
        self.due = True
        self.reports = 0

    def mark(self, name: str, now_s: float, count: int = 0) -> None:
        """Same as `Timeline.mark`, while phases are still wanted."""
        if self.due:
            self._part.mark(name, now_s, count)

    def mark_chunk(self, begun_s: float, ended_s: float, tokens: int) -> None:
        """Record a chunk, and the wait for the step that computed it."""
        if self.due:
            self._part.mark("step wait", begun_s)
            self._part.mark("chunk", ended_s, tokens)

    def take_first(self, first: handoff_pb2.FirstTokens, prefill_worker: str, now_s: float) -> None:
        """Insert the phases of the prefill worker, which ended with the first tokens."""
        if self.due:
            theirs = timeline.read(first.timeline, prefill_worker)
            self._part.insert(theirs, now_s, before="open", after="first token")

    def take_fetch(self, report: FetchReport, offset_s: float) -> None:
        """Record a complete fetch; `offset_s` is this timeline's clock minus the report's."""
        if not self.due or not report.offers:
            return
        hidden_s = self._part.at_s - offset_s  # what landed before was hidden
        landed_s = max(offer.landed for offer in report.offers)
        blocks = sum(offer.blocks for offer in report.offers if offer.landed > hidden_s)
        self._part.mark("fetch", landed_s + offset_s, blocks)
        self._part.mark("verify", report.verified + offset_s)
        self._fetch = _fetch_times(report, offset_s - self._arrived_s)

    def preempt(self, preempted_s: float, now_s: float) -> None:
        """Record that the request gave up its blocks, and has new ones now."""
        if self.reports and not self.due:
            self._part.mark("decode", preempted_s)
        self.due = self._preempted = True
        self._part.mark("credit wait", now_s)

    def report(self, output: worker_pb2.Output, now_s: float, step_s: tuple[float, float]) -> None:
        """Put the phases into the output, if it is the one that has to carry them."""
        if self.reports == 1 and not self._preempted and output.choice != self._choice:
            return
        if self.reports:
            self._part.mark("decode queue", step_s[0])
            self._part.mark("step", step_s[1])
        self._part.mark("first token" if not self.reports else "step", now_s)
        message = output.timeline
        timeline.write(self._part, message)
        message.preempted = self._preempted
        if self._fetch is not None:
            message.fetch.CopyFrom(self._fetch)
        self._fetch, self._preempted, self._choice = None, False, output.choice
        self._part = Timeline(now_s)
        self.reports += 1
        self.due = self.reports < 2


def _fetch_times(report: FetchReport, offset_s: float) -> worker_pb2.FetchTimes:
    """Return the message of a fetch; `offset_s` makes its times relative to the receipt."""
    times = worker_pb2.FetchTimes(
        bytes=report.bytes, reads=report.reads, transport=report.transport
    )
    offers = report.offers
    for index in range(min(len(offers), MAX_OFFERS)):
        rest = offers[index:] if index == MAX_OFFERS - 1 else offers[index : index + 1]
        times.begin_us.append(micros(min(offer.received for offer in rest) + offset_s))
        times.landed_us.append(micros(max(offer.landed for offer in rest) + offset_s))
        times.verified_us.append(micros(max(offer.verified for offer in rest) + offset_s))
        times.blocks.append(sum(offer.blocks for offer in rest))
    return times
