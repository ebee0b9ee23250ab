"""Submits an attempt to a worker: a view of the fleet, a placement, and the message.

Tries once, without waiting: the placement queue decides whether and when to try again. Holds no
state; the dispatcher assigns the attempt to the link that took it.
"""

from __future__ import annotations

import asyncio
import time

from baton.proto import worker_pb2
from baton.router.dispatch.attempt import Attempt, build_submit
from baton.router.fleet.explain import Explanation, explain
from baton.router.fleet.fleet import INDEX_NOT_REBUILT, Fleet
from baton.router.fleet.placement import (
    FleetView,
    Placement,
    PlacementInput,
    computation_us,
    open_groups,
    place,
)
from baton.router.fleet.request_need import Need
from baton.router.fleet.worker_link import WorkerLink
from baton.router.fleet.worker_view import WorkerView
from baton.runtime import metrics
from baton.runtime.config import RouterConfig
from baton.runtime.errors import Overloaded, Unavailable, WorkerLost
from baton.runtime.telemetry import tracing

DEADLINE_SHARE = 0.8  # of the time to its deadline, which a request may be expected to take


class Submitter:
    """`growth_tokens` of output are expected of a sequence, as decode workers expect them."""

    def __init__(self, fleet: Fleet, config: RouterConfig, growth_tokens: int) -> None:
        self._fleet = fleet
        self._config = config
        self._growth_tokens = growth_tokens

    def check_deadline(self, deadline_s: float) -> None:
        """Raise Overloaded if a new request would most likely miss its deadline: it would delay
        others in the queue and take work that no client receives."""
        within_s = DEADLINE_SHARE * (deadline_s - asyncio.get_running_loop().time())
        expected_s = self._fleet.expected_s()
        if expected_s > max(0.0, within_s):
            self._fleet.unplaced.refused += 1
            raise Overloaded(
                f"so many requests wait that this one would take {expected_s:.1f} s, which its "
                "deadline does not leave: try again later, or give it more time",
                expected_s - within_s,
            )

    def room(self) -> int:
        """How many requests could be tried now; 0: none could be placed, whatever it needs."""
        return self._fleet.room() if self._fleet.rebuilt() else 0

    def try_place(self, attempt: Attempt) -> WorkerLink:
        """Place and submit, and return the link that took the attempt. Raises the BatonError for
        which none did. The tokens are read only once there is a worker for them."""
        started_s = time.perf_counter()
        given = self._input(attempt)
        placement = place(given)
        metrics.PLACEMENT_SECONDS.observe(time.perf_counter() - started_s)
        return self._submit(attempt, given, placement)

    def explain(self, attempt: Attempt) -> Explanation:
        """Return the costs of the placement that the attempt would get now, and submit nothing.
        Raises the error for which no worker could take it."""
        given = self._input(attempt)
        return explain(given, place(given))

    def _input(self, attempt: Attempt) -> PlacementInput:
        """Return what the attempt's placement is made from. Raises the error for which no worker
        could take it. A router that has just started cannot place yet: it does not know which
        worker holds which blocks."""
        if not self._fleet.rebuilt():
            raise Unavailable(INDEX_NOT_REBUILT)
        need = self._need(attempt)
        known = self._fleet
        fleet = FleetView(known.roster(), known.passed_over(), known.deferred(), known.draws)
        groups = open_groups(need, fleet, self._fleet.disconnected_capacities)
        salt, chains = attempt.active_request.request.cache_salt, attempt.identities
        wanted = () if attempt.scored else attempt.tokens()  # what is scored is computed
        held = self._fleet.holders(wanted, salt, chains)
        # A step of a prefill worker is shared: what is computed alone stays where it is decoded.
        mode = "local" if attempt.alone else self._config.placement
        return PlacementInput(need, fleet, groups, held, mode, self._config.read_cached)

    def _need(self, attempt: Attempt) -> Need:
        active_request = attempt.active_request
        most_tokens = len(active_request.request.prompt) + active_request.request.max_tokens
        return Need(
            tokens=attempt.length,
            output_tokens=min(most_tokens - attempt.length, self._growth_tokens),
            most_tokens=most_tokens,
            sequences=len(attempt.choices),
            avoid=attempt.avoid,
            left=attempt.left,
            numerics=active_request.numerics if active_request.begun else None,
        )

    def _submit(self, attempt: Attempt, given: PlacementInput, placement: Placement) -> WorkerLink:
        tokens = given.need.tokens
        link = self._fleet.link(placement.decode.worker_id)
        if link is None:
            raise WorkerLost(f"{placement.decode.worker_id} has just left")
        remaining_s = attempt.active_request.deadline_s - asyncio.get_running_loop().time()
        message = build_submit(attempt, placement, remaining_s)
        message.trace_context.update(tracing.inject(attempt.context))
        link.send(worker_pb2.RouterMessage(submit=message))
        attempt.active_request.trace.record_sent(link.worker_id)
        identities = attempt.identities.get(placement.decode.kv_format.of_blocks, ())
        attempt.active_request.trace.record_prompt(identities, placement.decode.block_size)
        self._fleet.recent_prompts.add(identities)
        attempt.identities.clear()  # another attempt may have other tokens
        now_s = asyncio.get_running_loop().time()
        self._record_placement(placement.decode, now_s)
        attempt.candidates = frozenset(worker.boot_id for worker in placement.candidates)
        attempt.prefill = placement.candidates[0].boot_id if placement.candidates else b""
        attempt.active_request.numerics = placement.decode.numerics
        computed_us = computation_us(given, placement)
        _note_placed(link, tokens, computed_us if placement.local else 0)
        if placement.candidates:
            self._record_placement(placement.candidates[0], now_s)
            first = self._fleet.link(placement.candidates[0].worker_id)
            if first is not None:
                _note_placed(first, tokens, computed_us)
        decision = "local" if placement.local else "disaggregated"
        reason = "alone" if attempt.alone else placement.reason
        attempt.local_reason = reason if placement.local else ""
        metrics.DECISIONS_MADE.labels(decision, reason).inc()
        return link

    def _record_placement(self, worker: WorkerView, now_s: float) -> None:
        fleet = self._fleet
        fleet.circuits.record_placement(worker.boot_id, now_s)
        fleet.slow_start.record_placement(worker.worker_id, worker.role, fleet.roster(), now_s)


def _note_placed(link: WorkerLink, tokens: int, computed_us: int) -> None:
    link.placed_tokens += tokens
    link.placed_us += computed_us
    link.placed_requests += 1
