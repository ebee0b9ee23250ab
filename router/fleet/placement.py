"""Placement: pure functions from the known state to (decode worker, prefill candidates | local).

Costs are in tenths of a prompt token's computation, so that they can be added and compared
exactly:

    decode worker   moved tokens * MOVE_COST + sequences in its batch * SEQUENCE_COST
                    + tokens that lack KV room * ROOM_COST
    prefill worker  the prompt's prefill there + tokens queued there * TOKEN_COST
    the prompt's    here: uncached tokens * LOCAL_COST
    prefill         there: computed tokens * TOKEN_COST
                           + if it READs from the source: READ_COST + read tokens * MOVE_COST
                           + if it converts KV to another dtype: tokens * CONVERT_COST
                    and the move to the decode worker: moved tokens * MOVE_COST

The source is a worker that holds most of the prompt's leading blocks, such as the decode worker of
a conversation's last turn, with the answer. A prefill worker that holds fewer of them READs the
others there, where that costs less than computing them.

The router's view is a hint, some hundred milliseconds old; the decode worker grants the credit.
Knows no clock, no network, and of a request only its sizes. Of equal costs the lower worker id
wins. The time that a placement takes hardly depends on the number of workers: see roster.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from baton.router.fleet.radix_index import Holders
from baton.router.fleet.roster import Ranking, Roster, WorkerGroup
from baton.router.fleet.worker_view import (
    ROOM_COST,
    TOKEN_COST,
    KvFormat,
    NumericsId,
    WorkerCapacity,
    WorkerView,
    hands_over,
)
from baton.runtime.config import PlacementMode
from baton.runtime.errors import BatonError, InvalidRequest, Overloaded, Unavailable
from baton.runtime.worker.kv_bridge import most_targets

MOVE_COST = 1  # moving a token's KV
CONVERT_COST = 1  # converting it to another KV dtype
READ_COST = 160  # the opening of a handoff, without its tokens
LOCAL_COST = 40  # a decode worker computes a quarter as many prompt tokens, and delays its batch
MAX_CANDIDATES = 8
BUSY_RETRY_S = 1.0

# Why a prompt is prefilled where it is; docs/metrics.md explains each.
Reason = Literal[
    "configured", "cheaper", "short", "cached", "alone",
    "no_prefill_worker", "incompatible", "too_large", "left",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FleetView:
    """The linked workers, the boot ids of those whose circuit is open: the last choice; and of
    those in their slow start that have had their share for now: asked after the others."""

    roster: Roster
    passed_over: frozenset[bytes] = frozenset()
    deferred: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Need:
    """The sizes of a request: prompt and accepted tokens, the output that is expected beyond them
    (`StepConfig.expected_growth_tokens` at most), and `most_tokens`, the prompt with all output
    that a sequence may have. A decode worker counts the same numbers. `numerics` is that of the
    worker that drew the accepted tokens, None without accepted tokens: a worker with another one
    would continue another answer."""

    tokens: int
    output_tokens: int
    most_tokens: int
    sequences: int = 1
    avoid: frozenset[bytes] = frozenset()  # boot ids that failed this request: the last choice
    left: frozenset[bytes] = frozenset()  # boot ids of prefill workers that no longer existed
    numerics: NumericsId | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A worker of either role that holds the `blocks` leading blocks of a prompt."""

    worker: WorkerView
    blocks: int


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
) -> list[WorkerGroup] | BatonError:
    """Return the groups of decode workers of which some could take the request, or the reason why
    there is none: Unavailable (no worker is there, or only a `disconnected` one could),
    Overloaded (all of their queues are full), InvalidRequest (larger than any pool). The error is
    returned, not raised. Does not look at the blocks that workers hold."""
    known = fleet.roster.groups("decode")
    groups = [group for group in known if group.accepting]
    if not groups:
        return Unavailable("no decode worker is there: start one, or wait for its start")
    if need.numerics is not None:
        groups = [group for group in groups if group.numerics == need.numerics]
        if not groups:
            return Unavailable(
                "no decode worker is left that computes the same numbers as the one that began "
                f"this answer (fingerprint {need.numerics[0]}, KV in {need.numerics[1]}): "
                "send the request again, or start such a worker"
            )
    fitting = [group for group in groups if _holds(need, group.capacity)]
    if not fitting:
        return _too_large(need, [*(group.capacity for group in known), *disconnected()])
    over = fleet.passed_over
    if any(_trusts(group.accepting.values(), over) for group in fitting):
        open_ = [group for group in fitting if _trusts(group.open.values(), over)]
    else:
        open_ = [group for group in fitting if group.open]
    if not open_:
        return Overloaded("every decode worker's queue is full: try again later", BUSY_RETRY_S)
    return open_


def place(
    need: Need,
    fleet: FleetView,
    groups: Sequence[WorkerGroup],
    held: Callable[[KvFormat], Holders],
    mode: PlacementMode,
    local_prefill_tokens: int,
    *,
    read_cached: bool = True,
) -> Placement:
    """Return the cheapest placement on a decode worker of these open `groups`. `read_cached`:
    prefill workers may READ from a source."""
    wanted = wanted_tokens(need)
    decode = _ranked(
        _WorkerSearch(need, fleet, held, count=1),
        groups,
        lambda worker, uncached: decode_cost(worker, uncached, wanted),
        lambda uncached: (uncached * MOVE_COST, uncached * MOVE_COST + wanted * ROOM_COST),
    )[0]
    if mode == "local":
        return Placement(decode, (), local=True, reason="configured")
    compatible = [
        group
        for group in fleet.roster.groups("prefill")
        if hands_over(group.kv_format, decode.kv_format)
        and _computes(need, group.capacity, most_targets(group.kv_format[1], decode.kv_format[1]))
    ]
    holders = held(decode.kv_format)
    source = _source(fleet, holders, decode) if read_cached else None
    costs = PrefillCosts(need, source, decode.kv_format)
    candidates = _ranked(
        _WorkerSearch(need, fleet, held, MAX_CANDIDATES, need.left, decode.degraded),
        compatible,
        costs.total,
        lambda uncached: (costs.least(uncached),),
    )
    if not candidates:
        reason = _no_candidate(decode.kv_format, fleet.roster, compatible)
        return Placement(decode, (), local=True, reason=reason, costs=costs)
    first = candidates[0]
    here = uncached_tokens(need, holders.blocks(decode), decode.capacity)
    there = uncached_tokens(need, held(first.kv_format).blocks(first), first.capacity)
    source = source if costs.reads(first, there) else None
    if mode == "disaggregated":
        return Placement(decode, tuple(candidates), local=False, source=source, costs=costs)
    local = _local_reason(need, here, costs.remote(first, here, there), local_prefill_tokens)
    if local is not None:
        return Placement(decode, (), local=True, reason=local, costs=costs)
    chosen = tuple(candidates)
    return Placement(decode, chosen, local=False, reason="cheaper", source=source, costs=costs)


def wanted_tokens(need: Need) -> int:
    """Return the tokens for which a decode worker should have room."""
    return need.tokens + need.output_tokens * need.sequences


def decode_cost(worker: WorkerView, uncached: int, wanted: int) -> int:
    """Return the cost of a request on a decode worker that lacks `uncached` of its prompt's tokens
    and should have room for `wanted` tokens."""
    lacking = max(0, wanted - worker.room_tokens)
    return uncached * MOVE_COST + worker.batch_cost + lacking * ROOM_COST


class PrefillCosts:
    """The costs of a prompt's prefill on prefill workers, which may READ from its source, and
    convert what the decode worker stores in another KV dtype. Queues do not count: overload must
    not turn decode workers into prefill workers."""

    def __init__(self, need: Need, source: Source | None, decode: KvFormat) -> None:
        self._source = source
        self._decode = decode
        self._convert_cost = need.tokens * CONVERT_COST
        self._left = need.tokens  # tokens that the source does not hold
        if source is not None:
            self._left = uncached_tokens(need, source.blocks, source.worker.capacity)

    def at(self, worker: WorkerView, uncached: int) -> int:
        """Return the cost on a worker that lacks so many tokens."""
        cost = self.least(uncached) if self.reads(worker, uncached) else uncached * TOKEN_COST
        return cost if worker.kv_format[1] == self._decode[1] else cost + self._convert_cost

    def total(self, worker: WorkerView, uncached: int) -> int:
        """Return the same with the worker's queue."""
        return self.at(worker, uncached) + worker.queue_cost

    def remote(self, worker: WorkerView, moved: int, uncached: int) -> int:
        """Return the same with the move of what the decode worker lacks."""
        return self.at(worker, uncached) + moved * MOVE_COST

    def least(self, uncached: int) -> int:
        """Return the cost on any worker that lacks so many tokens, if it reads the source well."""
        read = max(0, uncached - self._left)
        return min(
            uncached * TOKEN_COST,
            READ_COST + read * MOVE_COST + (uncached - read) * TOKEN_COST,
        )

    def reads(self, worker: WorkerView, uncached: int) -> bool:
        """Return whether the worker should READ what it lacks of the source's blocks."""
        if self._source is None or self._source.worker.boot_id in worker.degraded:
            return False
        return self.least(uncached) < uncached * TOKEN_COST


def _source(fleet: FleetView, holders: Holders, decode: WorkerView) -> Source | None:
    """Return a worker that holds the most blocks and may be read: the decode worker itself where it
    does, since its blocks are held for the request."""
    for bits, blocks in holders.groups:
        if decode.bit & bits:
            return Source(decode, blocks)
        for worker in fleet.roster.of_bits(bits):
            fits = worker.kv_format == decode.kv_format and not worker.draining
            if fits and worker.boot_id not in fleet.passed_over:
                return Source(worker, blocks)
    return None


@dataclass(frozen=True, slots=True)
class _WorkerSearch:
    """A search for the first `count` workers, without the boot ids `barred`; `degraded` ones come
    after all others."""

    need: Need
    fleet: FleetView
    held: Callable[[KvFormat], Holders]
    count: int
    barred: frozenset[bytes] = frozenset()
    degraded: frozenset[bytes] = frozenset()


def _ranked(
    search: _WorkerSearch,
    groups: Sequence[WorkerGroup],
    price: Callable[[WorkerView, int], int],
    floors: Callable[[int], tuple[int, ...]],
) -> list[WorkerView]:
    """Return the cheapest workers first, then those whose pair with the decode worker is degraded,
    then those in their slow start, and last those that have failed the request. Workers that are
    passed over are returned only if there are no others: that others are full is no reason to use
    a worker that fails."""
    need = search.need

    def best(rank: tuple[bool, bool, bool], barred: frozenset[bytes]) -> list[WorkerView]:
        ranking = Ranking(search.count)
        for group in groups:
            for workers, others, blocks in search.held(group.kv_format).sets():
                uncached = uncached_tokens(need, blocks, group.capacity)

                def priced(worker: WorkerView, uncached: int = uncached) -> int | None:
                    boot_id = worker.boot_id
                    if boot_id in barred or _rank(search, boot_id) != rank:
                        return None
                    return price(worker, uncached)

                ranking.search(group, workers, others, priced, floors(uncached))
        return ranking.views()

    avoided, deferred = {False, bool(need.avoid)}, {False, bool(search.fleet.deferred)}
    ranks = sorted(product(avoided, deferred, {False, bool(search.degraded)}))
    for barred in (search.barred | search.fleet.passed_over, search.barred):
        found: list[WorkerView] = []
        for rank in ranks:
            if len(found) < search.count:
                found += best(rank, barred)
        if found:
            return found[: search.count]
    return []


def _rank(search: _WorkerSearch, boot_id: bytes) -> tuple[bool, bool, bool]:
    deferred = boot_id in search.fleet.deferred
    return boot_id in search.need.avoid, deferred, boot_id in search.degraded


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


def _local_reason(
    need: Need, here: int, remote_cost: int, local_prefill_tokens: int
) -> Reason | None:
    """Return why the decode worker computes the prompt, of which it lacks `here` tokens: few, or at
    less cost than the best prefill worker. None if it does not."""
    if here < local_prefill_tokens:
        return "short" if need.tokens < local_prefill_tokens else "cached"
    return "cheaper" if local_cost(here) < remote_cost else None


def local_cost(uncached: int) -> int:
    """Return the cost of a prefill on the decode worker."""
    return uncached * LOCAL_COST


def uncached_tokens(need: Need, held_blocks: int, worker: WorkerCapacity) -> int:
    """Return the tokens that the worker has to compute; the last prompt token is always one."""
    return need.tokens - min(held_blocks * worker.block_size, need.tokens - 1)


def _holds(need: Need, worker: WorkerCapacity) -> bool:
    """Return whether a decode worker could ever take the request. Counts like the worker's own
    queue: the longest that one sequence may become, and the credit of all sequences."""
    size = worker.block_size
    grown = _blocks(need.tokens + need.output_tokens, size)
    credit = grown + (need.sequences - 1) * (grown - need.tokens // size)  # full blocks are shared
    wanted = max(credit, _blocks(need.most_tokens, size))
    return wanted <= worker.total_blocks and need.most_tokens <= worker.max_context


def _computes(need: Need, worker: WorkerCapacity, targets: int) -> bool:
    """Return whether a prefill worker has room for all of the tokens, and for `targets` blocks to
    convert each of theirs."""
    blocks = _blocks(need.tokens, worker.block_size) * (1 + targets)
    return blocks <= worker.total_blocks and need.tokens <= worker.max_context


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _too_large(need: Need, decoders: Sequence[WorkerCapacity]) -> BatonError:
    if any(_holds(need, worker) for worker in decoders):
        return Unavailable(
            "no decode worker whose KV pool is large enough takes work now: send the request again"
        )
    largest = max(min(e.total_blocks * e.block_size, e.max_context) for e in decoders)
    asked = f"of {need.most_tokens} tokens of prompt and output"
    if need.sequences > 1:
        asked = f"of {need.sequences} choices {asked} each"
    return InvalidRequest(
        f"a request {asked} does not fit the largest KV pool ({largest} tokens): shorten the "
        "prompt, lower max_tokens or n, or start a worker with a larger pool",
        "prompt" if need.tokens >= largest else "max_tokens",
    )
