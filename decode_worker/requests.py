"""The living requests of a decode worker: emits their tokens, and ends each choice once.

Invariant I4 is kept here: every output carries (attempt, choice, index), and no output of a
choice follows its end. The scheduler frees the blocks of an ended sequence. Metrics and spans of
prompts that are computed on this worker are recorded here too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from typing import Any

from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group, Request, Sequence
from baton.decode_worker.step_plan import StepPlan, VerifiedRun
from baton.engine.scheduling.batch import Drawn, StepResult
from baton.engine.scheduling.chunks import Chunk
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import handoff_metrics, logs, metrics
from baton.runtime.config import StepConfig
from baton.runtime.errors import (
    BatonError,
    DeadlineExceeded,
    Draining,
    EngineError,
    HandoffError,
    InvalidRequest,
)
from baton.runtime.grammar.matcher import over_limits
from baton.runtime.telemetry import tracing
from baton.runtime.wire import ModelLimits, check_scores
from baton.runtime.worker.step_log import StepLog
from baton.runtime.worker.work_counts import WorkCounts

log = logs.get(__name__)


class Requests:
    """The living requests of a worker. Owned by its loop."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        limits: ModelLimits,
        wall: Callable[[], float],
        step: StepConfig,
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._wall = wall  # seconds of time.time(), for spans
        self._living: dict[str, Request] = {}
        self.counts = WorkCounts()
        self.step_log = StepLog(step)
        self.served = 0  # requests whose last choice finished, by a stop string too
        self.idle = asyncio.Event()  # set while there is no request
        self.idle.set()
        self._preemptions = 0
        self._preempted_wall_s = 0.0  # when a plan last preempted
        self._step_wall_s = (0.0, 0.0)  # begin and end of the step that is being committed

    def add(self, request: Request) -> None:
        self._living[request.request_id] = request
        self.counts.requests += len(request.sequences)
        self.idle.clear()

    def get(self, request_id: str) -> Request | None:
        return self._living.get(request_id)

    def living(self) -> list[Request]:
        return list(self._living.values())

    def record_preemptions(self, count: int) -> None:
        """Record when a plan preempted, from the number of all preemptions so far."""
        if count > self._preemptions:
            self._preemptions, self._preempted_wall_s = count, self._wall()

    def record_admission(self, group: Group, cached_tokens: int, now_wall_s: float) -> None:
        """Record that a group has credit, and its blocks, of which some hold `cached_tokens`: for
        the first time, when its request is counted, or again."""
        request = group.request
        if group.local == "recompute":  # what is cached may be its own
            request.timeline.preempt(self._preempted_wall_s, now_wall_s)
        else:
            request.timeline.mark("credit wait", now_wall_s)
            request.cached_tokens = max(request.cached_tokens, cached_tokens)
        if request.admitted:
            return
        request.admitted = True
        metrics.QUEUE_SECONDS.observe(now_wall_s - request.arrived_wall_s)
        metrics.PREFIX_QUERIED_TOKENS.inc(len(group.tokens))
        metrics.PREFIX_CACHED_TOKENS.inc(cached_tokens)
        tracing.record(
            tracing.CREDIT_WAIT,
            request.arrived_wall_s,
            now_wall_s,
            request.trace,
            critical=group.unanswered,
        )

    def work(self) -> dict[str, Any]:
        """Return the part of the worker's audit that planners read: counters, and recent steps."""
        steps = self.step_log.audit()
        return asdict(self.counts) | steps | {"kv_dtype": self._limits.kv_dtype}

    def record_step(
        self,
        plan: StepPlan,
        result: StepResult,
        chunks: list[Chunk[Group]],
        begun_wall_s: float,
        ended_wall_s: float,
    ) -> None:
        """Record when the step ran whose tokens come next, in the timelines of `chunks` too: those
        of its chunks whose prompts go on. Its time is that of all that it computed."""
        due = self.step_log.due(ended_wall_s, chunks=bool(plan.chunks), verifies=plan.verifies)
        if due and not result.failed:
            spans = [(chunk.start, chunk.end) for chunk in plan.chunks]
            contexts = [each.computed for each in plan.decoding]
            seconds = result.interval_s or ended_wall_s - begun_wall_s
            self.step_log.record(spans, contexts, ended_wall_s, seconds)
        self._step_wall_s = begun_wall_s, ended_wall_s
        for chunk in chunks:
            tokens = chunk.end - chunk.start
            self.counts.prompt_tokens += tokens
            chunk.key.request.timeline.mark_chunk(begun_wall_s, ended_wall_s, tokens)

    def record_output(self, tokens: int) -> None:
        """Count the tokens that a step drew."""
        metrics.TOKENS.labels("output").inc(tokens)
        self.counts.output_tokens += tokens

    def accept_run(self, run: VerifiedRun) -> None:
        """Emit the tokens of a step that verified proposals, in their order."""
        last = len(run.drawn) - 1
        for index, drawn in enumerate(run.drawn):
            rejected = run.proposed - run.accepted if index == last else 0
            self.accept(run.sequence, drawn, proposed=index < run.accepted, rejected=rejected)

    def accept(
        self, sequence: Sequence, drawn: Drawn, *, proposed: bool = False, rejected: int = 0
    ) -> None:
        """Emit a drawn token, and the choice's end if this token is its last. `proposed`: it was
        a proposal; `rejected`: so many other proposals were made for this step in vain."""
        if sequence.ended:
            return
        if sequence.masks is not None and sequence.masks.error is not None:
            self.fail(sequence, InvalidRequest(over_limits(sequence.masks.error)))
            return
        request = sequence.request
        sequence.output.append(drawn.token)
        output = self._output(sequence, index=len(sequence.output) - 1)
        output.token = drawn.token
        output.accepted_proposal, output.rejected_proposals = proposed, rejected
        if drawn.logprob is not None:
            output.logprob = drawn.logprob
            for token, logprob in drawn.top:
                output.top.add(token=token, logprob=logprob)
        if request.timeline.due:
            request.timeline.report(output, self._wall(), self._step_wall_s)
        if not request.first_token_wall_s:
            request.first_token_wall_s = self._wall()
        if len(sequence.output) == 1:
            output.cached_tokens = request.cached_tokens
            if request.prompt_logprobs is not None and sequence is request.sequences[0]:
                output.prompt_logprobs.CopyFrom(request.prompt_logprobs)
                request.prompt_logprobs = None
        if drawn.token in request.stop_token_ids:
            output.end = worker_pb2.STOP
        elif len(sequence.output) >= request.max_tokens:
            output.end = worker_pb2.LENGTH
        if output.end:
            self._end(sequence, served=True)
        request.emit(output)

    def accept_first(self, group: Group, first: handoff_pb2.FirstTokens) -> None:
        """Take the first tokens, drawn by the prefill worker. Those of an earlier handoff of the
        same group stand; those of a later one are ignored. Raises HandoffError if they do not fit
        the group."""
        by_choice = {token.choice: token for token in first.tokens}
        if set(by_choice) != {sequence.choice for sequence in group.sequences}:
            raise HandoffError("the first tokens are not those of the choices asked for")
        if any(token.token >= self._limits.vocab_size for token in first.tokens):
            raise HandoffError("a first token is outside the vocabulary")
        self._take_scores(group, first)
        for sequence in group.sequences:
            if sequence.length == len(group.tokens) and not sequence.ended:
                token = by_choice[sequence.choice]
                top = tuple((entry.token, entry.logprob) for entry in token.top)
                logprob = token.logprob if token.HasField("logprob") else None
                self.accept(sequence, Drawn(token.choice, token.token, logprob, top))
                metrics.TOKENS.labels("output").inc()

    def _take_scores(self, group: Group, first: handoff_pb2.FirstTokens) -> None:
        """Take the prompt's scores, if wanted. Raises HandoffError if they do not fit it."""
        if not group.scored:
            return
        request = group.request
        scores, top = first.prompt_logprobs, request.unscored or 0
        check_scores(scores, len(request.prompt), top, self._limits.vocab_size)
        request.prompt_logprobs = scores

    def cancel(self, request: Request, choices: Collection[int] = ()) -> None:
        """End the named choices, whose texts are finished, or all where none is named."""
        for sequence in request.sequences:
            if not choices or sequence.choice in choices:
                self._end_without_token(sequence, worker_pb2.CANCELLED, served=bool(choices))

    def fail(self, sequence: Sequence, error: BatonError) -> None:
        if sequence.ended:
            return
        log_at = log.info if isinstance(error, Draining) else log.warning
        (log.error if isinstance(error, EngineError) else log_at)(
            "request failed",
            request_id=sequence.request.request_id,
            attempt=sequence.request.attempt,
            choice=sequence.choice,
            code=error.code,
            detail=str(error),
        )
        failure = worker_pb2.Failure(code=error.code, detail=str(error), retryable=error.retryable)
        self._end_without_token(sequence, worker_pb2.FAILED, failure)

    def deadline_passed(self, request: Request) -> None:
        for sequence in request.sequences:
            self.fail(sequence, DeadlineExceeded("the request's deadline has passed"))

    def _end_without_token(
        self,
        sequence: Sequence,
        reason: worker_pb2.EndReason,
        failure: worker_pb2.Failure | None = None,
        served: bool = False,
    ) -> None:
        if sequence.ended:
            return
        output = self._output(sequence, index=len(sequence.output))
        output.end = reason
        if failure is not None:
            output.failure.CopyFrom(failure)
        self._end(sequence, served)
        sequence.request.emit(output)

    def _end(self, sequence: Sequence, served: bool) -> None:
        self._scheduler.end(sequence)
        self.counts.ended_requests += 1
        self.counts.ended_output_tokens += len(sequence.output)
        request = sequence.request
        if not request.ended:
            return
        self.served += served
        self._living.pop(request.request_id, None)
        if not self._living:
            self.idle.set()
        if request.deadline is not None:
            request.deadline.cancel()
        if request.first_token_wall_s:
            tokens = sum(len(s.output) for s in request.sequences)
            drafts = [s.proposals for s in request.sequences if s.proposals is not None]
            tracing.record(
                tracing.DECODE,
                request.first_token_wall_s,
                self._wall(),
                request.trace,
                output_tokens=tokens,
                batched_s=request.batched_wall_s,
                proposed_tokens=sum(draft.proposed for draft in drafts),
                accepted_tokens=sum(draft.accepted for draft in drafts),
            )
        # Sequences refer to their request: such a cycle would live until the next collection.
        request.sequences = []

    def _output(self, sequence: Sequence, index: int) -> worker_pb2.Output:
        request = sequence.request
        return worker_pb2.Output(
            request_id=request.request_id,
            attempt=request.attempt,
            choice=sequence.choice,
            index=index,
        )


def record_local_start(group: Group, wall_s: float) -> None:
    """Record that the group's prompt has its blocks and will be computed on this worker."""
    group.prefill_wall_s = wall_s
    handoff_metrics.LOCAL_PREFILLS.labels(group.local).inc()


def record_local_chunks(
    chunks: Iterable[Chunk[Group]], started_wall_s: float, ended_wall_s: float, block_size: int
) -> None:
    """Record the chunks that a step has computed, with a prefill worker's spans and the reason
    in `local`. Times are seconds of time.time()."""
    for chunk in chunks:
        group, trace, local = chunk.key, chunk.key.request.trace, str(chunk.key.local)
        recomputed = max(0, min(chunk.end, group.recomputed_tokens) - chunk.start)
        metrics.TOKENS.labels("recomputed").inc(recomputed)
        metrics.TOKENS.labels("prompt").inc(chunk.end - chunk.start - recomputed)
        tracing.record(
            tracing.CHUNK,
            started_wall_s,
            ended_wall_s,
            trace,
            start=chunk.start,
            end=chunk.end,
            local=local,
            critical=group.unanswered,
        )
        if chunk.last:
            cached, start_s = group.held * block_size, group.prefill_wall_s
            tracing.record(
                tracing.PREFILL, start_s, ended_wall_s, trace, cached_tokens=cached, local=local
            )
