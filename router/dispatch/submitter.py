"""Handing a submission to a worker: what is known of the fleet, a placement, and the message.

One try, without waiting: the line decides whether and when there is another. Holds no state of
its own.
"""

from __future__ import annotations

import asyncio
import time

from baton.proto import worker_pb2
from baton.router.dispatch.attempt import Attempt, build_submit
from baton.router.dispatch.attempts import Attempts
from baton.router.fleet.fleet import INDEX_NOT_REBUILT, Fleet
from baton.router.fleet.placement import FleetView, Need, Placement, open_groups, place
from baton.router.fleet.worker_link import WorkerLink
from baton.runtime import metrics, tracing
from baton.runtime.config import RouterConfig
from baton.runtime.errors import BatonError, Overloaded, Unavailable, WorkerLost
from baton.runtime.links import LinkClosed

HOPE = 0.8  # of the time to its deadline, what a request is expected to take at most


class Submitter:
    """`growth_tokens` of output are expected of a sequence, as decode workers expect them."""

    def __init__(
        self, fleet: Fleet, submissions: Attempts, config: RouterConfig, growth_tokens: int
    ) -> None:
        self._fleet = fleet
        self._submissions = submissions
        self._config = config
        self._growth_tokens = growth_tokens

    def check_hope(self, deadline_s: float) -> None:
        """Raises Overloaded if a new request would most likely miss its deadline: in the line
        it would delay others, and be worked for in vain."""
        within_s = HOPE * (deadline_s - asyncio.get_running_loop().time())
        expected_s = self._fleet.expected_s()
        if expected_s > max(0.0, within_s):
            raise Overloaded(
                f"so many requests wait that this one would take {expected_s:.1f} s, which its "
                "deadline does not leave: try again later, or give it more time",
                expected_s - within_s,
            )

    def room(self) -> int:
        """How many requests could be tried now; 0: none could be placed, whatever it needs."""
        return self._fleet.room() if self._fleet.rebuilt() else 0

    def try_place(self, submission: Attempt) -> BatonError | None:
        """Place and submit; or why it cannot be done now, and then no worker has heard of it.
        A router that was just started does not know yet who holds what, so it cannot. The tokens
        are only looked at once there is a worker for them."""
        if not self._fleet.rebuilt():
            return Unavailable(INDEX_NOT_REBUILT)
        started_s = time.perf_counter()
        need = self._need(submission)
        fleet = FleetView(self._fleet.roster(), self._fleet.passed_over())
        kinds = open_groups(need, fleet, self._fleet.disconnected_sizes)
        if isinstance(kinds, BatonError):
            return kinds
        salt, known = submission.generation.request.cache_salt, submission.identities
        wanted = () if submission.scored else submission.tokens()  # what is scored is computed
        held = self._fleet.holders(wanted, salt, known)
        # A step of a prefill worker is shared: what is computed alone stays where it is decoded.
        mode = "local" if submission.alone else self._config.placement
        placement = place(need, fleet, kinds, held, mode, self._config.local_prefill_tokens)
        metrics.PLACEMENT_SECONDS.observe(time.perf_counter() - started_s)
        return self._submit(submission, placement, need.tokens)

    def _need(self, submission: Attempt) -> Need:
        generation = submission.generation
        most_tokens = len(generation.request.prompt) + generation.request.max_tokens
        return Need(
            tokens=submission.length,
            output_tokens=min(most_tokens - submission.length, self._growth_tokens),
            most_tokens=most_tokens,
            sequences=len(submission.choices),
            avoid=submission.avoid,
            left=submission.left,
            numbers=generation.numbers if generation.begun else None,
        )

    def _submit(self, submission: Attempt, placement: Placement, tokens: int) -> BatonError | None:
        link = self._fleet.link(placement.decode.worker_id)
        if link is None:
            return WorkerLost(f"{placement.decode.worker_id} has just left")
        remaining_s = submission.generation.deadline_s - asyncio.get_running_loop().time()
        message = build_submit(submission, placement, remaining_s)
        message.trace_context.update(tracing.inject(submission.context))
        try:
            link.send(worker_pb2.RouterMessage(submit=message))
        except (LinkClosed, Overloaded) as error:
            return error
        self._submissions.assign(submission, link)
        submission.identities.clear()  # another attempt may have other tokens
        now_s = asyncio.get_running_loop().time()
        self._fleet.circuits.record_placement(link.boot_id, now_s)
        submission.candidates = frozenset(worker.boot_id for worker in placement.candidates)
        submission.prefill = placement.candidates[0].boot_id if placement.candidates else b""
        submission.generation.numbers = placement.decode.numbers
        _note_placed(link, tokens)
        if placement.candidates:
            self._fleet.circuits.record_placement(submission.prefill, now_s)
            first = self._fleet.link(placement.candidates[0].worker_id)
            if first is not None:
                _note_placed(first, tokens)
        metrics.PLACEMENTS.labels("local" if placement.local else "disaggregated").inc()
        return None


def _note_placed(link: WorkerLink, tokens: int) -> None:
    link.placed_tokens += tokens
    link.placed_requests += 1
