"""Placement: pure functions from the known state to (decode worker, prefill candidates | local).

The workers are compared by the time that a request is predicted to take on them, in microseconds
(worker_costs.py), plus the time by which it delays others:

    decode worker   the batch: what its sequences delay the request, and the request them
                    + the queue: prompts that it computes itself before
                    + credit: the wait for the KV room that it lacks
                    + the prompt's prefill: here without its queue, or there
                    + slow start
    prefill worker  its queue + computing the prompt, or what it READs of it from the source
                    + converting KV to another dtype + what a slow or far pair adds to the move
                    + slow start
    the prompt's    here: the queue, the steps of the prompt, and their delay for each stream
    prefill         there: the wait, the computation, the handoff, and the move of its KV

The source is a worker that holds most of the prompt's leading blocks, such as the decode worker of
a conversation's last turn, with the answer. A prefill worker that holds fewer of them READs the
others there, where that takes less time than to compute them.

The router's view is a hint, some hundred milliseconds old; the decode worker grants the credit.
Knows no clock, no network, and of a request only its sizes. The time that a placement takes hardly
depends on the number of workers: see roster.py. The costs of one worker: placement_costs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from baton.router.fleet.placement_costs import (
    DecodeCosts,
    LocalPrefill,
    PrefillCosts,
    RemotePrefill,
)
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.request_need import (
    Need,
    Source,
    computes,
    holds,
    too_large,
    uncached_tokens,
)
from baton.router.fleet.roster import Prices, Ranked, Ranking, Roster, WorkerGroup
from baton.router.fleet.worker_view import (
    KvFormat,
    WorkerCapacity,
    WorkerView,
    hands_over,
)
from baton.runtime.config import PlacementMode
from baton.runtime.errors import Overloaded, Unavailable
from baton.runtime.worker.kv_bridge import most_targets

MAX_CANDIDATES = 8
TIE_US, TIE_SHARE = 1000, 0.05  # predictions that differ by less are alike
BUSY_RETRY_S = 1.0

# Why a prompt is prefilled where it is; docs/metrics.md explains each.
Reason = Literal[
    "configured", "cheaper", "short", "cached", "alone",
    "no_prefill_worker", "incompatible", "too_large", "left",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FleetView:
    """The linked workers, the boot ids of those whose circuit is open: the last choice; and of
    those in their slow start that have had their share for now. `draws` chooses between workers
    that are alike; without it the lower worker id comes first."""

    roster: Roster
    passed_over: frozenset[bytes] = frozenset()
    deferred: frozenset[bytes] = frozenset()
    draws: Random | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen workers. `candidates` are prefill workers, best first; empty if `local`. The first
    of them READs what it lacks of the source's blocks; None if it computes all that it lacks."""

    decode: WorkerView
    candidates: tuple[WorkerView, ...]
    local: bool
    reason: Reason = field(default="configured", compare=False)
    source: Source | None = None
    costs: PrefillCosts | None = field(default=None, compare=False)


def open_groups(
    need: Need, fleet: FleetView, disconnected: Callable[[], Sequence[WorkerCapacity]] = tuple
) -> list[WorkerGroup]:
    """Return the groups of decode workers of which some could take the request. Does not look at
    the blocks that workers hold.

    Raises Unavailable if no worker is there, or only a `disconnected` one could take it, Overloaded
    if all of their queues are full, and InvalidRequest for a request larger than any pool.
    """
    known = fleet.roster.groups("decode")
    groups = [group for group in known if group.accepting]
    if not groups:
        raise Unavailable("no decode worker is there: start one, or wait for its start")
    if need.numerics is not None:
        groups = [group for group in groups if group.numerics == need.numerics]
        if not groups:
            raise Unavailable(
                "no decode worker is left that computes the same numbers as the one that began "
                f"this answer (fingerprint {need.numerics[0]}, KV in {need.numerics[1]}): "
                "send the request again, or start such a worker"
            )
    fitting = [group for group in groups if holds(need, group.capacity)]
    if not fitting:
        raise too_large(need, [*(group.capacity for group in known), *disconnected()])
    over = fleet.passed_over
    if any(_trusts(group.accepting.values(), over) for group in fitting):
        open_ = [group for group in fitting if _trusts(group.open.values(), over)]
    else:
        open_ = [group for group in fitting if group.open]
    if not open_:
        raise Overloaded("every decode worker's queue is full: try again later", BUSY_RETRY_S)
    return open_


@dataclass(frozen=True, slots=True)
class PlacementInput:
    """A request and all that its placement may know: the fleet, the `groups` of decode workers that
    are open for it, and the workers that hold its leading blocks, for each format. `read_cached`:
    prefill workers may READ from a source."""

    need: Need
    fleet: FleetView
    groups: Sequence[WorkerGroup]
    held: Callable[[KvFormat], Holders]
    mode: PlacementMode
    read_cached: bool = True

    def uncached(self, worker: WorkerView) -> int:
        """Return the tokens of the prompt that a worker has to compute."""
        return uncached_tokens(
            self.need, self.held(worker.kv_format).blocks(worker), worker.capacity
        )


Placer = Callable[[PlacementInput], Placement]  # `place`, or a rule that is compared with it


def place(given: PlacementInput) -> Placement:
    """Return the quickest placement on an open decode worker."""
    return _Placing(given).place()


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The prefill workers for one format of decode workers, the quickest first; without any,
    `reason` says why. `costs` are those of the prompt on them."""

    workers: Sequence[WorkerView]
    costs: PrefillCosts
    reason: Reason = "cheaper"


class _Placing:
    """One placement."""

    def __init__(self, given: PlacementInput) -> None:
        self._given = given
        self._need, self._fleet, self._mode = given.need, given.fleet, given.mode

    def place(self) -> Placement:
        """Choose the decode worker by all that it costs, then the prefill workers for it."""
        groups, uncached = self._given.groups, self._given.uncached
        formats = dict.fromkeys(group.kv_format for group in groups)
        remote = {kv_format: self._remote(kv_format) for kv_format in formats}
        decode = self._decode_worker(groups, remote)
        costs = PrefillCosts(self._need, self._fleet.deferred, decode.kv_format)
        if self._mode == "local":
            return Placement(decode, (), local=True, costs=costs)
        found = self._candidates(decode.kv_format, decode)
        if not found.workers:
            return Placement(decode, (), local=True, reason=found.reason, costs=found.costs)
        first, costs = found.workers[0], found.costs
        source = costs.source if costs.reads(first, uncached(first)) else None
        reason: Reason = "configured"
        if self._mode == "auto":
            local = self._local_reason(decode, first, costs)
            if local is not None:
                return Placement(decode, (), local=True, reason=local, costs=costs)
            reason = "cheaper"
        chosen = tuple(found.workers)
        return Placement(decode, chosen, False, reason, source, costs)

    def _remote(self, kv_format: KvFormat) -> RemotePrefill | None:
        """Return the prefill on the quickest prefill worker for any decode worker of that format;
        None if there is no such worker, or none may be used."""
        if self._mode == "local":
            return None
        found = self._candidates(kv_format, count=1)
        if not found.workers:
            return None
        first = found.workers[0]
        return found.costs.remote(first, self._given.uncached(first))

    def _decode_worker(
        self, groups: Sequence[WorkerGroup], remote: dict[KvFormat, RemotePrefill | None]
    ) -> WorkerView:
        need, auto, deferred = self._need, self._mode == "auto", self._fleet.deferred

        def prices(group: WorkerGroup, uncached: int) -> Prices:
            there = remote[group.kv_format]
            costs = DecodeCosts.of(need, group.costs, uncached, there, auto=auto, deferred=deferred)
            least_us = costs.least_us(group.least_running)
            credit_us = group.costs.credit_us(group.capacity.total_blocks * group.kv_format[2])
            return Prices(costs.price_us, (least_us, least_us + costs.wanted * credit_us))

        return self._ranked(groups, prices, count=1)[0]

    def _candidates(
        self, kv_format: KvFormat, decode: WorkerView | None = None, count: int = MAX_CANDIDATES
    ) -> _Candidates:
        """Return `count` prefill workers at most for decode workers of a format, or for one."""
        need, fleet = self._need, self._fleet
        compatible = [
            group
            for group in fleet.roster.groups("prefill")
            if hands_over(group.kv_format, kv_format)
            and computes(need, group.capacity, most_targets(group.kv_format[1], kv_format[1]))
        ]
        source = self._source(kv_format, decode) if self._given.read_cached else None
        slow, topology = ({}, "") if decode is None else (decode.degraded, decode.topology)
        costs = PrefillCosts(need, fleet.deferred, kv_format, source, slow, topology)

        def prices(group: WorkerGroup, uncached: int) -> Prices:
            alike = costs.alike(group.costs, group.kv_format[1], uncached)
            return Prices(alike.price_us, (alike.least_us,))

        found = self._ranked(compatible, prices, count=count, barred=need.left)
        if found:
            return _Candidates(found, costs)
        return _Candidates((), costs, _no_candidate(kv_format, fleet.roster, compatible))

    def _local_reason(
        self, decode: WorkerView, first: WorkerView, costs: PrefillCosts
    ) -> Reason | None:
        """Return why the decode worker computes the prompt, if that takes less time than the best
        prefill worker; else None."""
        need, here = self._need, self._given.uncached(decode)
        there = costs.remote(first, self._given.uncached(first))
        wait_us, local = there.wait_us, LocalPrefill.of(decode.costs, need, here)
        local_us = local.total_us(decode, wait_us)
        if local_us >= there.total_us(here):
            return None
        if local_us >= there.total_us(here) - wait_us:
            return "cheaper"
        whole_us = LocalPrefill.of(decode.costs, need, need.tokens).total_us(decode, wait_us)
        return "short" if whole_us < there.total_us(need.tokens) else "cached"

    def _source(self, kv_format: KvFormat, decode: WorkerView | None) -> Source | None:
        """Return a worker that holds the most blocks and may be read. The decode worker is chosen
        before others, since its blocks are held for the request."""
        for bits, blocks in self._given.held(kv_format).groups:
            if decode is not None and decode.bit & bits:
                return Source(decode, blocks)
            for worker in self._fleet.roster.of_bits(bits):
                fits = worker.kv_format == kv_format and not worker.draining
                if fits and worker.boot_id not in self._fleet.passed_over:
                    return Source(worker, blocks)
        return None

    def _ranked(
        self,
        groups: Sequence[WorkerGroup],
        prices: Callable[[WorkerGroup, int], Prices],
        *,
        count: int,
        barred: frozenset[bytes] = frozenset(),
    ) -> list[WorkerView]:
        """Return `count` workers at most, the cheapest first, then those that have failed the
        request. Workers that are passed over are returned only if there are no others: that others
        are full is no reason to use a worker that fails."""
        need, fleet = self._need, self._fleet
        looked = max(count, MAX_CANDIDATES) if fleet.draws is not None else count

        def best(avoided: bool, barred: frozenset[bytes]) -> list[WorkerView]:
            ranking = Ranking(looked)
            for group in groups:
                for workers, others, blocks in self._given.held(group.kv_format).sets():
                    uncached = uncached_tokens(need, blocks, group.capacity)

                    def priced(group: WorkerGroup = group, uncached: int = uncached) -> Prices:
                        return _among(prices(group, uncached), need.avoid, barred, avoided=avoided)

                    if not ranking.search(group, workers, others, priced):
                        break
            return _chosen(ranking.best(), fleet.draws)

        for unused in (barred | fleet.passed_over, barred):
            found = best(False, unused)
            if len(found) < count and need.avoid:
                found += best(True, unused)
            if found:
                return found[:count]
        return []


def _among(
    prices: Prices, avoid: frozenset[bytes], barred: frozenset[bytes], *, avoided: bool
) -> Prices:
    """Return the prices without those of `barred` workers, and of all that the request avoids, or
    of all others if `avoided`."""
    if not (avoid or barred):
        return prices
    price = prices.price

    def checked(worker: WorkerView) -> int | None:
        boot_id = worker.boot_id
        if boot_id in barred or (boot_id in avoid) != avoided:
            return None
        return price(worker)

    return Prices(checked, prices.floors)


def _chosen(ranked: Sequence[Ranked], draws: Random | None) -> list[WorkerView]:
    """Return the workers in their order, except that the better of two drawn workers comes first,
    both of them as quick as the quickest: routers that see the same fleet should not all choose the
    same worker (Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001)."""
    views = [view for _, _, view in ranked]
    if draws is None or len(ranked) < 2:
        return views
    most = ranked[0][0] + max(TIE_US, int(TIE_SHARE * ranked[0][0]))
    alike = sum(cost <= most for cost, _, _ in ranked)
    if alike < 2:
        return views
    drawn = draws.sample(range(alike), 2)
    first = min(drawn, key=lambda index: ranked[index][0])  # equal ones: whichever was drawn first
    return [views[first], *views[:first], *views[first + 1 :]]


def computation_us(given: PlacementInput, placed: Placement) -> int:
    """Return for how long the worker that gets the prompt will compute it."""
    worker = placed.decode if placed.local else placed.candidates[0]
    uncached = given.uncached(worker)
    if placed.local or placed.costs is None:
        return worker.costs.compute_us(given.need.tokens - uncached, given.need.tokens)
    return placed.costs.parts(worker, uncached).compute_us


def _trusts(workers: Iterable[WorkerView], passed_over: frozenset[bytes]) -> bool:
    return any(worker.boot_id not in passed_over for worker in workers)


def _no_candidate(kv_format: KvFormat, roster: Roster, usable: Sequence[WorkerGroup]) -> Reason:
    """Return why no prefill worker can be a candidate. `usable` ones hold the prompt, but are
    draining or have left."""
    groups = roster.groups("prefill")
    if not groups:
        return "no_prefill_worker"
    if usable:
        return "left"
    readable = any(hands_over(group.kv_format, kv_format) for group in groups)
    return "too_large" if readable else "incompatible"
