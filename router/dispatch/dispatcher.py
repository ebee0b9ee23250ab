"""The owner of all requests and their attempts: places, submits, accepts outputs, retries, ends.

    start ─▶ place ─▶ submit(attempt) ─▶ outputs ─▶ end    every choice ends exactly once
               ▲           │ worker lost, or a retryable failure
               └─ permit ◀─┘ attempt + 1, with the accepted tokens, as the retry policy decides

Only the current attempt and the next index of each choice are accepted (I4). An attempt is what
one worker holds of a request: all its choices at first; after a loss, each unfinished choice that
goes on from accepted tokens has an attempt of its own. A request's deadline ends it in any state.
The event loop owns all state; nothing here waits for a client. The retry policy, the placement
queue and the submitter decide and report; attempts change here alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from opentelemetry.context import Context

from baton.proto import worker_pb2
from baton.router.dispatch.active_request import ActiveRequest, OutputToken
from baton.router.dispatch.attempt import (
    SUSPECT,
    Attempt,
    CheckedOutput,
    check_output,
    ended_before_loss,
    quarantine_error,
)
from baton.router.dispatch.attempts import Attempts
from baton.router.dispatch.placement_queue import STOPPING, PlacementQueue
from baton.router.dispatch.retry_policy import Retry, RetryPolicy
from baton.router.dispatch.submitter import Submitter
from baton.router.fleet.explain import Explanation
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.worker_link import WorkerLink
from baton.router.requests.deadline import passed
from baton.router.requests.request_trace import RequestTrace
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime import logs, metrics
from baton.runtime.config import RouterConfig, StepConfig
from baton.runtime.errors import (
    BatonError,
    Cancelled,
    Draining,
    OutOfMemory,
    Overloaded,
    StalePlacement,
    Unavailable,
    WorkerLost,
    by_code,
)

PLACE_WAIT_S = 15.0  # for a worker to appear: longer than a worker's restart
CONFIRM_WEIGHT = 128  # some 20 KB in the worker

log = logs.get(__name__)


class Dispatcher:
    """The listener of every worker link. `place_wait_s` bounds how long a request waits for a
    worker, or for the index, before it is refused as Unavailable; a request that a draining worker
    returned waits for `returned_wait_s`, in which the worker may come back. No wait outlasts
    the deadline. Once outputs of `confirm_weight` per choice are accepted, their worker may forget
    them. `attempts` are for others to read."""

    place_wait_s = PLACE_WAIT_S
    confirm_weight = CONFIRM_WEIGHT

    def __init__(self, fleet: Fleet, config: RouterConfig, step: StepConfig) -> None:
        self._config = config
        self._fleet = fleet
        self._circuits = fleet.circuits
        self.attempts = Attempts()
        self._submitter = Submitter(fleet, config, step.expected_growth_tokens)
        self._queue = PlacementQueue(self._submitter, fleet.unplaced)
        self._retries = RetryPolicy(config, lambda: len(self.attempts))
        self._retrying: set[asyncio.Task[None]] = set()
        self._stopping = False

    def __len__(self) -> int:
        return len(self.attempts)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a worker to take them."""
        return len(self._queue)

    async def start(
        self,
        request: ValidatedRequest,
        request_id: str,
        context: Context,
        deadline_s: float,
        trace: RequestTrace | None = None,
    ) -> ActiveRequest:
        """Place and submit; `deadline_s` is on the loop's clock. Raises Unavailable, Overloaded,
        InvalidRequest or DeadlineExceeded if no worker can take it (in time); then no worker
        has heard of it. If cancelled, the request ends."""
        self.check_deadline(deadline_s)
        active_request = ActiveRequest(
            request_id, request, self._config.stream_buffer_messages, deadline_s, trace
        )
        attempt = Attempt(request_id, active_request, set(range(request.choices)), context)
        self.attempts.add(attempt)
        self._retries.recheck()
        try:
            link = await self._queue.place(attempt, self.place_wait_s)
        except BaseException:  # a caller that is cancelled leaves no attempt behind
            self.attempts.remove(request_id)
            raise
        self.attempts.assign(attempt, link)
        active_request.timer = asyncio.get_running_loop().call_at(
            deadline_s, self._deadline_passed, active_request
        )
        return active_request

    def check_deadline(self, deadline_s: float) -> None:
        """Raise Unavailable or Overloaded if a new request would be served too late."""
        if self._stopping:
            raise Unavailable(STOPPING)
        self._submitter.check_deadline(deadline_s)

    def explain(self, request: ValidatedRequest) -> Explanation:
        """Same as `Submitter.explain`, for a new request."""
        active_request = ActiveRequest("", request, 1, _now())
        return self._submitter.explain(
            Attempt("", active_request, set(range(request.choices)), Context())
        )

    def cancel(self, active_request: ActiveRequest, error: BatonError | None = None) -> None:
        """End a request now; the cancels to its workers are sent in the same tick."""
        for attempt in self.attempts.of(active_request):
            self._drop(attempt)
            attempt.send_cancel()
        active_request.end(error or Cancelled("the client left"))

    def _deadline_passed(self, active_request: ActiveRequest) -> None:
        self.cancel(active_request, passed("answering"))

    def finish_choice(self, active_request: ActiveRequest, choice: int) -> None:
        """End a choice at a stop string: what the worker still sends of it is dropped."""
        active_request.choices[choice].ended = True
        for attempt in self.attempts.of(active_request):
            if choice not in attempt.choices:
                continue
            self._record_success(attempt)
            attempt.choices.discard(choice)
            if not attempt.choices:
                self._drop(attempt)
            attempt.send_cancel(choice)
        self._end_if_done(active_request)

    def end_all(self) -> None:
        """Fail every request, now and from now on: the router stops."""
        self._stopping = True
        for attempt in list(self.attempts.values()):
            self.cancel(attempt.active_request, Unavailable(STOPPING))
        self._queue.wake()

    async def close(self) -> None:
        """Fail every request, and wait until the tasks of retries have ended."""
        self.end_all()
        for task in self._retrying:
            task.cancel()
        await asyncio.gather(*self._retrying, return_exceptions=True)

    # -- what links report ------------------------------------------------------------------

    def take(self, link: WorkerLink, outputs: worker_pb2.StepOutputs) -> bool:
        crowded, met = False, set[ActiveRequest]()
        for asked in outputs.prefill_switches:  # before outputs: one of them may be its end
            attempt = self._current(link, asked)
            if attempt is not None:
                self._switch_prefill(attempt, asked)
        for output in outputs.outputs:
            attempt = self._current(link, output)
            if attempt is not None and output.choice in attempt.choices:
                active_request = attempt.active_request
                if output.HasField("token") and active_request not in met:  # an end has room
                    met.add(active_request)
                    if active_request.too_slow():
                        self.cancel(active_request, Cancelled("the client reads too slowly"))
                        continue
                self._accept(attempt, output)
                crowded = crowded or active_request.full
                continue
            metrics.STALE_OUTPUTS.inc()
            if output.end and output.request_id not in self.attempts:
                link.settle(output.request_id)
        for asked in outputs.prefill_switches:
            attempt = self._current(link, asked)
            if attempt is not None:
                self._check_switch(attempt, asked)
        return crowded

    def pending(self, link: WorkerLink) -> list[worker_pb2.Resume]:
        return [attempt.resume() for attempt in self.attempts.on(link)]

    def lost(self, link: WorkerLink, request_ids: Iterable[str] | None, reason: str) -> None:
        wanted = None if request_ids is None else set(request_ids)
        concerned = self.attempts.on(link)
        if concerned and wanted is None and not link.load.draining:
            self._circuits.record_failure(link.boot_id, _now())
        for attempt in concerned:
            if wanted is None or attempt.wire_id in wanted:
                self.attempts.assign(attempt, None)
                loss = Draining if link.load.draining else WorkerLost
                self._retry(attempt, loss(f"{link.worker_id}: {reason}"), link.boot_id)

    def hung(self, link: WorkerLink) -> None:
        """Retry the requests of a hung worker elsewhere, and those whose prompt it was to prefill:
        no other process can notice that it hangs. Its later outputs belong to an old attempt."""
        self._circuits.record_hang(link.boot_id, _now())
        suspects = set(link.load.overdue_requests)
        for attempt in list(self.attempts.values()):
            if attempt.link is not None and (attempt.link is link or attempt.waits_for(link)):
                attempt.hangs += attempt.wire_id in suspects
                self._leave_hung(attempt, link)

    def _leave_hung(self, attempt: Attempt, hung: WorkerLink) -> None:
        if attempt.hangs > SUSPECT:
            self._fail(attempt, quarantine_error(attempt, hung.worker_id), False)
            return
        error = WorkerLost(f"{hung.worker_id} computes nothing any more")
        self._fail(attempt, error, True, hung.boot_id)

    def _current(
        self, link: WorkerLink, message: worker_pb2.Output | worker_pb2.PrefillSwitch
    ) -> Attempt | None:
        """Return the attempt of a message, if it is current and on this link."""
        attempt = self.attempts.get(message.request_id)
        if attempt is None or attempt.link is not link:
            return None
        return attempt if attempt.attempt == message.attempt else None

    def _switch_prefill(self, attempt: Attempt, asked: worker_pb2.PrefillSwitch) -> None:
        """Record that its decode worker asks another prefill worker now, or none. It may report
        as failed only candidates of this attempt, each once."""
        failed = attempt.candidates.intersection(asked.failed_boot_ids)
        for boot_id in failed - attempt.avoid:
            self._circuits.record_failure(boot_id, _now())
        attempt.avoid |= failed
        attempt.record_switch(asked)
        self._circuits.record_placement(attempt.prefill, _now())

    def _check_switch(self, attempt: Attempt, asked: worker_pb2.PrefillSwitch) -> None:
        """Leave a prefill worker that hung before it was asked. Outputs of the same message came
        before the switch, unless the message says otherwise."""
        attempt.answered = asked.output_received
        link = self._fleet.link_of_boot(attempt.prefill)
        if link is not None and link.hung and attempt.waits_for(link):
            self._leave_hung(attempt, link)

    def _accept(self, attempt: Attempt, output: worker_pb2.Output) -> None:
        if output.end == worker_pb2.FAILED:
            failure = output.failure
            self._fail(attempt, by_code(failure.code, failure.detail), failure.retryable)
            return
        try:
            checked = check_output(attempt, output, self._fleet.vocab_size)
        except WorkerLost as error:
            self._fail(attempt, error, True)
            return
        if checked is None:
            metrics.STALE_OUTPUTS.inc()
            return
        trace = attempt.active_request.trace
        if output.HasField("timeline") or trace.wants_output:
            trace.record_output(output.timeline)
            self._fleet.record_handoff(attempt.link, output.timeline, attempt.prefill)
        cached_tokens = min(output.cached_tokens, len(attempt.active_request.request.prompt))
        self._put(attempt, checked, cached_tokens)

    def _put(self, attempt: Attempt, checked: CheckedOutput, cached_tokens: int) -> None:
        active_request, token = attempt.active_request, checked.token
        if checked.scores is not None:
            active_request.scores = checked.scores
        active_request.cached_tokens = max(active_request.cached_tokens, cached_tokens)
        active_request.put(token)
        attempt.record_output(token, self._fleet.recent_prefills)
        self._retries.release(attempt)
        for boot_id in attempt.short:
            self._circuits.record_failure(boot_id, _now())
        attempt.short = frozenset()
        if token.finish is not None:
            self._record_success(attempt)
            self._end_choice(attempt, token.choice)
        self._confirm(attempt, token.weight)

    def _confirm(self, attempt: Attempt, weight: int) -> None:
        """Confirm outputs from time to time: until then their worker keeps what it has sent."""
        attempt.unconfirmed += weight
        worth = self.confirm_weight * len(attempt.choices)
        if attempt.link is not None and 0 < worth <= attempt.unconfirmed:
            attempt.link.confirm(attempt.resume())
            attempt.unconfirmed = 0

    def _record_success(self, attempt: Attempt) -> None:
        if attempt.link is not None:
            self._circuits.record_success(attempt.link.boot_id, _now())
            self._circuits.record_success(attempt.prefill, _now())

    # -- how attempts end -------------------------------------------------------------------

    def _fail(
        self, attempt: Attempt, error: BatonError, retryable: bool, failed: bytes = b""
    ) -> None:
        """Cancel what the worker still holds of an attempt that failed there, and retry it if that
        can help. `failed` is the boot id of the worker that failed, if it is another."""
        boot_id = failed or (attempt.link.boot_id if attempt.link is not None else b"")
        if isinstance(error, OutOfMemory):
            attempt.short |= {boot_id}
        elif retryable and not failed and not isinstance(error, Overloaded | Draining):
            self._circuits.record_failure(boot_id, _now())
        attempt.send_cancel()
        if isinstance(error, StalePlacement):
            attempt.left, boot_id = attempt.left | attempt.candidates, b""
        elif attempt.link is not None and isinstance(error, Draining):
            attempt.link.note_draining()
        self.attempts.assign(attempt, None)
        if retryable:
            self._retry(attempt, error, boot_id)
        else:
            self.cancel(attempt.active_request, error)

    def _retry(self, attempt: Attempt, error: BatonError, failed_boot_id: bytes) -> None:
        """Replace an attempt that is on no worker by the next one, or end its request."""
        active_request = attempt.active_request
        if active_request.over:  # another part of it has just failed for good
            return
        self._end_complete_choices(attempt)
        if not attempt.choices:
            return
        active_request.trace.record_loss()
        try:
            retry = self._retries.decide(attempt, error)
        except BatonError as final:
            self.cancel(active_request, final)
            return
        report = log.info if retry.returned else log.warning
        report("request retried", request_id=active_request.request_id, reason=str(error))
        self.attempts.remove(attempt.wire_id)
        for part in attempt.continued(failed_boot_id, retry.returned):
            self.attempts.add(part)
            part.placing = asyncio.create_task(self._place_retry(part, retry))
            self._retrying.add(part.placing)
            part.placing.add_done_callback(self._retrying.discard)

    def _end_complete_choices(self, attempt: Attempt) -> None:
        """End the choices whose last token arrived while the message of their end was lost."""
        for choice in sorted(attempt.choices):
            finish = ended_before_loss(attempt.active_request, choice)
            if finish is not None:
                attempt.active_request.put(OutputToken(choice, None, finish=finish))
                self._end_choice(attempt, choice)

    async def _place_retry(self, attempt: Attempt, retry: Retry) -> None:
        """A task per retry, which ends with its attempt: the request's deadline cancels it."""
        await asyncio.sleep(retry.pause_s)  # 0 unless a busy worker had refused it
        try:
            await self._retries.acquire(attempt, retry)
            metrics.MIGRATIONS.labels(retry.reason).inc()
            attempt.active_request.migrations += 1
            wait_s = self._config.returned_wait_s if retry.returned else self.place_wait_s
            link = await self._queue.place(attempt, wait_s, retry.returned)
            self.attempts.assign(attempt, link)
        except BatonError as error:
            self._give_up(attempt, error)
        except Exception as error:  # a defect: report it to the client now, not at its deadline
            log.exception("retry failed", request_id=attempt.active_request.request_id)
            self._give_up(attempt, BatonError(f"the retry failed: {type(error).__name__}"))

    def _give_up(self, attempt: Attempt, error: BatonError) -> None:
        if self.attempts.get(attempt.wire_id) is attempt:
            self.cancel(attempt.active_request, error)

    def _end_choice(self, attempt: Attempt, choice: int) -> None:
        attempt.choices.discard(choice)
        if not attempt.choices:
            self.attempts.remove(attempt.wire_id)
            if attempt.link is not None:
                attempt.link.settle(attempt.wire_id)
        self._end_if_done(attempt.active_request)

    def _end_if_done(self, active_request: ActiveRequest) -> None:
        if all(choice.ended for choice in active_request.choices):
            active_request.end()

    def _drop(self, attempt: Attempt) -> None:
        """Remove an attempt that is no longer wanted, with its task and its permit."""
        self.attempts.remove(attempt.wire_id)
        if attempt.placing is not None and attempt.placing is not asyncio.current_task():
            attempt.placing.cancel()
        self._retries.release(attempt)


def _now() -> float:
    return asyncio.get_running_loop().time()
