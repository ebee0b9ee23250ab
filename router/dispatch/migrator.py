"""What becomes of a submission that a worker could not carry to its end: placed again, or failed.

    fail ─▶ again ─▶ turn (the budget of moves) ─▶ line ─▶ another worker, attempt + 1
                └──▶ no attempt or move is left: its request fails with the last error

Blames who failed, and counts the attempts. Knows no outputs: those are the dispatcher's, with
which this shares the submissions. Owned by the event loop, as are its tasks.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from baton.router.dispatch.active_request import ActiveRequest, OutputToken
from baton.router.dispatch.attempt import Attempt, ended_before_loss
from baton.router.dispatch.attempts import Attempts
from baton.router.dispatch.migration_queue import MigrationQueue
from baton.router.dispatch.placement_queue import PlacementQueue
from baton.router.dispatch.retry_budget import RetryBudget
from baton.router.fleet.circuits import Circuits
from baton.runtime import logs, metrics
from baton.runtime.config import RouterConfig
from baton.runtime.errors import BatonError, Draining, OutOfMemory, Overloaded, StalePlacement

BUSY_PAUSE_S = 0.25  # before a request that a client sees the tokens of asks a full worker again

log = logs.get(__name__)


class Requests(Protocol):
    """Who owns the requests: the dispatcher. `place_wait_s` as there."""

    place_wait_s: float

    def cancel(self, generation: ActiveRequest, error: BatonError | None = None) -> None: ...

    def choice_ended(self, submission: Attempt, choice: int) -> None: ...


class Migrator:
    """`submissions` are all that the dispatcher has: a move takes one out and puts the next attempt
    in."""

    def __init__(
        self,
        requests: Requests,
        submissions: Attempts,
        circuits: Circuits,
        line: PlacementQueue,
        config: RouterConfig,
    ) -> None:
        self._requests = requests
        self._submissions = submissions
        self._circuits = circuits
        self._line = line
        self._config = config
        self._budget = RetryBudget(config.retry_share, config.retry_floor)
        self._turns = MigrationQueue(self._budget, lambda: len(submissions))
        self._placing: set[asyncio.Task[None]] = set()

    def look(self) -> None:
        """More is being served than before: more may be moved."""
        self._turns.look()

    async def close(self) -> None:
        """End every move, and wait for its task."""
        for task in self._placing:
            task.cancel()
        await asyncio.gather(*self._placing, return_exceptions=True)

    def fail(
        self, submission: Attempt, error: BatonError, retryable: bool, failed: bytes = b""
    ) -> None:
        """The worker could not do it: cancel what it still holds, and try elsewhere if that
        can help. `failed` is the boot id of who is to blame, if it is another."""
        boot_id = failed or (submission.link.boot_id if submission.link is not None else b"")
        if isinstance(error, OutOfMemory):
            submission.short |= {boot_id}
        elif retryable and not failed and not isinstance(error, Overloaded | Draining):
            self._circuits.record_failure(boot_id, _now())
        submission.tell_cancel()
        if isinstance(error, StalePlacement):
            submission.left, boot_id = submission.left | submission.candidates, b""
        elif submission.link is not None and isinstance(error, Draining):
            submission.link.note_draining()
        self._submissions.assign(submission, None)
        if retryable:
            self.again(submission, error, boot_id)
        else:
            self._requests.cancel(submission.generation, error)

    def again(self, submission: Attempt, error: BatonError, failed_boot_id: bytes) -> None:
        """Place a submission again, from its accepted tokens. It is on no worker now."""
        generation = submission.generation
        if generation.over:  # another part of it has just failed for good
            return
        for choice in sorted(submission.choices):
            finish = ended_before_loss(generation, choice)
            if finish is not None:  # its last token arrived, only the word of its end was lost
                generation.put(OutputToken(choice, None, finish=finish))
                generation.choices[choice].ended = True
                self._requests.choice_ended(submission, choice)
        if not submission.choices:
            return
        drained = isinstance(error, Draining)
        if isinstance(error, Overloaded):
            submission.busy = error
        if drained or isinstance(error, Overloaded):  # who is full has failed nobody
            self.got_on(submission)
        elif submission.move is not None:
            self._turns.failed(submission.move, short=isinstance(error, OutOfMemory))
            submission.move = None
        if not drained and submission.failures >= self._config.max_attempts:
            metrics.RETRIES_REFUSED.labels("attempts").inc()
            self._requests.cancel(generation, submission.busy or error)
            return
        say = log.info if drained else log.warning
        say("request placed again", request_id=generation.request_id, reason=str(error))
        self._submissions.remove(submission.wire_id)
        for part in submission.continued(failed_boot_id, drained):
            self._submissions.add(part)
            busy = isinstance(error, Overloaded) and generation.begun
            pause_s = BUSY_PAUSE_S * submission.attempt if busy else 0.0
            task = asyncio.create_task(self._place_again(part, pause_s, error))
            part.placing = task
            self._placing.add(task)
            task.add_done_callback(self._placing.discard)

    async def _place_again(self, submission: Attempt, pause_s: float, why: BatonError) -> None:
        """A task of its own, which ends with the submission: its deadline cancels it. What a
        drain hands back asks the budget for nothing: nobody has failed."""
        await asyncio.sleep(pause_s)
        try:
            drained = isinstance(why, Draining)
            if not drained:
                await self._take_turn(submission, short=isinstance(why, OutOfMemory))
            metrics.MIGRATIONS.inc()
            submission.generation.migrations += 1
            wait_s = self._config.handed_back_s if drained else self._requests.place_wait_s
            await self._line.place(submission, wait_s, drained)
        except BatonError as error:
            self._not_placed(submission, error)
        except Exception as error:  # of what should be impossible: its client is told at once
            log.exception(
                "a move failed in an unknown way", request_id=submission.generation.request_id
            )
            self._not_placed(submission, BatonError(f"a move failed: {type(error).__name__}"))

    def _not_placed(self, submission: Attempt, error: BatonError) -> None:
        if self._submissions.get(submission.wire_id) is submission:
            self._requests.cancel(submission.generation, error)

    async def _take_turn(self, submission: Attempt, *, short: bool) -> None:
        """Wait until the budget has room for one move more. Raises Overloaded if it is used up."""
        try:
            submission.move = await self._turns.take(short=short)
        except Overloaded:
            metrics.RETRIES_REFUSED.labels("budget").inc()
            raise

    def got_on(self, submission: Attempt) -> None:
        if submission.move is not None:
            move, submission.move = submission.move, None
            self._turns.got_on(move)


def _now() -> float:
    return asyncio.get_running_loop().time()
