"""The life of a request between its validation and its end: placed, submitted, carried on.

    place ─▶ submit(attempt) ─▶ outputs ─▶ end         every choice ends exactly once
      ▲           │ worker lost, or a retryable failure
      └── turn ◀──┘ attempt + 1, with the accepted tokens, as the budget of moves allows

Only the current attempt and the next index of each choice are accepted (I4). A submission is
what one worker holds of a request: all its choices at first; after a loss, each unfinished
choice that goes on from accepted tokens is a submission of its own. A request's deadline ends it
in whatever it is at. All state is owned by the event loop; nothing here waits on a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from opentelemetry.context import Context

from baton.proto import worker_pb2
from baton.router.dispatch.active_request import ActiveRequest
from baton.router.dispatch.attempt import SUSPECT, Attempt, hangs_workers, output_token
from baton.router.dispatch.attempts import Attempts
from baton.router.dispatch.migrator import Migrator
from baton.router.dispatch.placement_queue import STOPPING, PlacementQueue
from baton.router.dispatch.prompt_logprobs import scores_of
from baton.router.dispatch.submitter import Submitter
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.worker_link import WorkerLink
from baton.router.requests.deadline import passed
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime import logs, metrics
from baton.runtime.config import RouterConfig, StepConfig
from baton.runtime.errors import (
    BatonError,
    Cancelled,
    Draining,
    Unavailable,
    WorkerLost,
    by_code,
)

PLACE_WAIT_S = 15.0  # for a worker to appear: longer than a worker's restart
CONFIRM_WEIGHT = 128  # some 20 KB in the worker

log = logs.get(__name__)


class Dispatcher:
    """The Bearer of every link. `place_wait_s` bounds how long a request waits for a worker, or
    for the index, before it is refused as Unavailable; what a worker has handed back waits for
    `router.handed_back_s`, in which the worker may come back. No wait outlasts the deadline.
    Once outputs of `confirm_weight` per choice were accepted, their worker may forget them."""

    place_wait_s = PLACE_WAIT_S
    confirm_weight = CONFIRM_WEIGHT

    def __init__(self, fleet: Fleet, config: RouterConfig, step: StepConfig) -> None:
        self._config = config
        self._fleet = fleet
        self._circuits = fleet.circuits
        self._submissions = Attempts()
        self._placer = Submitter(fleet, self._submissions, config, step.expected_growth_tokens)
        self._line = PlacementQueue(self._placer)
        self._moves = Migrator(self, self._submissions, fleet.circuits, self._line, config)
        self._stopping = False

    def __len__(self) -> int:
        return len(self._submissions)

    async def start(
        self,
        request: ValidatedRequest,
        request_id: str,
        context: Context,
        deadline_s: float,
    ) -> ActiveRequest:
        """Place and submit; `deadline_s` is on the loop's clock. Raises Unavailable, Overloaded,
        InvalidRequest or DeadlineExceeded if no worker can take it (in time); then no worker
        has heard of it. If cancelled, the request ends."""
        self.check_hope(deadline_s)
        generation = ActiveRequest(
            request_id, request, self._config.stream_buffer_messages, deadline_s
        )
        submission = Attempt(request_id, generation, set(range(request.choices)), context)
        self._submissions.add(submission)
        self._moves.look()
        try:
            await self._line.place(submission, self.place_wait_s)
        except BaseException:
            self._submissions.remove(request_id)
            raise
        generation.timer = asyncio.get_running_loop().call_at(
            deadline_s, self._deadline_passed, generation
        )
        return generation

    def check_hope(self, deadline_s: float) -> None:
        """Raises Unavailable or Overloaded if a new request would be served too late."""
        if self._stopping:
            raise Unavailable(STOPPING)
        self._placer.check_hope(deadline_s)

    def cancel(self, generation: ActiveRequest, error: BatonError | None = None) -> None:
        """End a request now; its workers are told in the same tick."""
        for submission in self._submissions.of(generation):
            self._withdraw(submission)
        generation.end(error or Cancelled("the client left"))

    def _deadline_passed(self, generation: ActiveRequest) -> None:
        self.cancel(generation, passed("answering"))

    def finish_choice(self, generation: ActiveRequest, choice: int) -> None:
        """A stop string ended this choice: what the worker still sends of it is not wanted."""
        generation.choices[choice].ended = True
        for submission in self._submissions.of(generation):
            if choice not in submission.choices:
                continue
            self._served(submission)
            submission.choices.discard(choice)
            if not submission.choices:
                self._forget(submission)
            submission.tell_cancel(choice)
        self._end_if_done(generation)

    def end_all(self) -> None:
        """Fail every request, those to come included: the router stops."""
        self._stopping = True
        for submission in list(self._submissions.values()):
            self.cancel(submission.generation, Unavailable(STOPPING))
        self._line.wake()

    async def close(self) -> None:
        """Fail what is left, and wait for the tasks of this dispatcher."""
        self.end_all()
        await self._moves.close()

    # -- Bearer ------------------------------------------------------------------------------

    def take(self, link: WorkerLink, outputs: worker_pb2.StepOutputs) -> bool:
        crowded, met = False, set[ActiveRequest]()
        for asked in outputs.prefill_switches:  # before outputs: one of them may be its end
            submission = self._current(link, asked)
            if submission is not None:
                self._turned(submission, asked)
        for output in outputs.outputs:
            submission = self._current(link, output)
            if submission is not None and output.choice in submission.choices:
                generation = submission.generation
                if output.HasField("token") and generation not in met:  # an end has room
                    met.add(generation)
                    if generation.too_slow():
                        self.cancel(generation, Cancelled("the client reads too slowly"))
                        continue
                self._accept(submission, output)
                crowded = crowded or generation.full
                continue
            metrics.STALE_OUTPUTS.inc()
            if output.end and output.request_id not in self._submissions:
                link.settle(output.request_id)
        for asked in outputs.prefill_switches:
            submission = self._current(link, asked)
            if submission is not None:
                self._waits_there(submission, asked)
        return crowded

    def pending(self, link: WorkerLink) -> list[worker_pb2.Resume]:
        return [submission.resume() for submission in self._submissions.on(link)]

    def lost(self, link: WorkerLink, request_ids: Iterable[str] | None, reason: str) -> None:
        wanted = None if request_ids is None else set(request_ids)
        concerned = self._submissions.on(link)
        if concerned and wanted is None and not link.load.draining:
            self._circuits.record_failure(link.boot_id, _now())
        for submission in concerned:
            if wanted is None or submission.wire_id in wanted:
                self._submissions.assign(submission, None)
                loss = Draining if link.load.draining else WorkerLost
                self._moves.again(submission, loss(f"{link.worker_id}: {reason}"), link.boot_id)

    def hung(self, link: WorkerLink) -> None:
        """Its requests go on elsewhere, and so do those whose prompt it was to prefill: nobody
        else can tell that it computes nothing. What it says of them later is of an old attempt."""
        self._circuits.record_hang(link.boot_id, _now())
        suspects = set(link.load.overdue_requests)
        for submission in list(self._submissions.values()):
            if submission.link is not None and (
                submission.link is link or submission.waits_for(link)
            ):
                submission.hangs += submission.wire_id in suspects
                self._left(submission, link)

    def _left(self, submission: Attempt, hung: WorkerLink) -> None:
        if submission.hangs > SUSPECT:
            self._moves.fail(submission, hangs_workers(submission, hung.worker_id), False)
            return
        error = WorkerLost(f"{hung.worker_id} computes nothing any more")
        self._moves.fail(submission, error, True, hung.boot_id)

    def _current(
        self, link: WorkerLink, word: worker_pb2.Output | worker_pb2.PrefillSwitch
    ) -> Attempt | None:
        """What the word is of, if that worker has the request now, and in that attempt."""
        submission = self._submissions.get(word.request_id)
        if submission is None or submission.link is not link:
            return None
        return submission if submission.attempt == word.attempt else None

    def _turned(self, submission: Attempt, asked: worker_pb2.PrefillSwitch) -> None:
        """Its decode worker asks another prefill worker now, or none. A worker may accuse only
        those that it was to ask, each once."""
        failed = submission.candidates.intersection(asked.failed_boot_ids)
        for boot_id in failed - submission.avoid:
            self._circuits.record_failure(boot_id, _now())
        submission.avoid |= failed
        submission.asks(asked)
        self._circuits.record_placement(submission.prefill, _now())

    def _waits_there(self, submission: Attempt, asked: worker_pb2.PrefillSwitch) -> None:
        """Outputs of the same message came before it turned, unless it says otherwise; whom it
        asks may have hung before it was asked."""
        submission.answered = asked.output_received
        link = self._fleet.link_of_boot(submission.prefill)
        if link is not None and link.hung and submission.waits_for(link):
            self._left(submission, link)

    def _accept(self, submission: Attempt, output: worker_pb2.Output) -> None:
        accepted = len(submission.generation.choices[output.choice].accepted)
        if output.end == worker_pb2.CANCELLED:
            self._moves.fail(submission, WorkerLost("the worker gave the request up"), True)
            return
        if output.end == worker_pb2.FAILED:
            failure = output.failure
            self._moves.fail(submission, by_code(failure.code, failure.detail), failure.retryable)
            return
        generation = submission.generation
        if output.index < accepted:
            metrics.STALE_OUTPUTS.inc()
            return
        if output.index > accepted:
            self._moves.fail(
                submission, WorkerLost("outputs are missing between two indices"), True
            )
            return
        made = output_token(output)
        if made.largest >= self._fleet.vocab_size:
            self._moves.fail(
                submission, WorkerLost("a token is outside the model's vocabulary"), True
            )
            return
        if generation.unscored and output.choice == 0 and made.token is not None:
            prompt = len(generation.request.prompt)
            scores = scores_of(output.prompt_logprobs, prompt, self._fleet.vocab_size)
            if scores is None:
                lost = WorkerLost("the prompt's log-probabilities are missing or malformed")
                self._moves.fail(submission, lost, True)
                return
            generation.scores = scores
        cached = min(output.cached_tokens, len(generation.request.prompt))
        generation.cached_tokens = max(generation.cached_tokens, cached)
        generation.put(made)
        submission.answered = True
        self._moves.got_on(submission)
        for boot_id in submission.short:
            self._circuits.record_failure(boot_id, _now())
        submission.short = frozenset()
        if made.finish is not None:
            self._served(submission)
            self.choice_ended(submission, output.choice)
        self._confirm(submission, made.weight)

    def _confirm(self, submission: Attempt, weight: int) -> None:
        """Its worker keeps what it has sent until it is told; now and then it is."""
        submission.unconfirmed += weight
        worth = self.confirm_weight * len(submission.choices)
        if submission.link is not None and 0 < worth <= submission.unconfirmed:
            submission.link.confirm(submission.resume())
            submission.unconfirmed = 0

    def _served(self, submission: Attempt) -> None:
        if submission.link is not None:
            self._circuits.record_success(submission.link.boot_id, _now())
            self._circuits.record_success(submission.prefill, _now())

    def choice_ended(self, submission: Attempt, choice: int) -> None:
        submission.choices.discard(choice)
        if not submission.choices:
            self._submissions.remove(submission.wire_id)
            if submission.link is not None:
                submission.link.settle(submission.wire_id)
        self._end_if_done(submission.generation)

    def _end_if_done(self, generation: ActiveRequest) -> None:
        if all(choice.ended for choice in generation.choices):
            generation.end()

    def _withdraw(self, submission: Attempt) -> None:
        self._forget(submission)
        submission.tell_cancel()

    def _forget(self, submission: Attempt) -> None:
        """Nobody wants it any more."""
        self._submissions.remove(submission.wire_id)
        if submission.placing is not None and submission.placing is not asyncio.current_task():
            submission.placing.cancel()
        self._moves.got_on(submission)


def _now() -> float:
    return asyncio.get_running_loop().time()
