"""Placement: pure functions from what is known to (decode worker, prefill candidates | local).

Costs are in tenths of a prompt token's computation, so that they can be added, and compared
exactly:

    decode worker   moved tokens * MOVE_COST + sequences in its batch * SEQUENCE_COST
                    + tokens that lack KV room * ROOM_COST
    prefill worker  (uncached tokens + tokens queued there) * TOKEN_COST
    the prompt's    here: uncached tokens * LOCAL_COST
    prefill         there: uncached tokens * TOKEN_COST + moved tokens * MOVE_COST

The router's view is a hint, some hundred milliseconds old; the decode worker grants the credit.
Knows no clock, no network and no request but its sizes. Equal costs: the lower worker id. The
time that a placement takes hardly depends on the number of workers: see roster.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from baton.router.fleet.radix_index import Holders
from baton.router.fleet.roster import Kind, Ranking, Roster
from baton.router.fleet.worker_view import ROOM_COST, Numbers, Shape, Size, WorkerView
from baton.runtime.config import PlacementMode
from baton.runtime.errors import BatonError, InvalidRequest, Overloaded, Unavailable

TOKEN_COST = 10
MOVE_COST = 1  # moving a token's KV
LOCAL_COST = 40  # a decode worker's step takes a quarter of the prompt tokens, and delays its batch
MAX_CANDIDATES = 8
BUSY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class FleetView:
    """The linked workers, and the boot ids of those whose circuit is open: a last resort."""

    roster: Roster
    passed_over: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Need:
    """What is to be placed: prompt and accepted tokens, the output that is expected beyond them
    (`step.expected_growth_tokens` at most), and `most_tokens`, the prompt with all output that a
    sequence may have: the numbers that a decode worker counts. `numbers` are those that the
    accepted tokens were computed with, None where there are none: other workers would go on with
    another answer, and are none for this request."""

    tokens: int
    output_tokens: int
    most_tokens: int
    sequences: int = 1
    avoid: frozenset[bytes] = frozenset()  # boot ids that failed this request; a last resort
    left: frozenset[bytes] = frozenset()  # of prefill workers that were not there any more
    numbers: Numbers | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where. `candidates` are prefill workers, best first; none where `local`."""

    decode: WorkerView
    candidates: tuple[WorkerView, ...]
    local: bool


def open_kinds(
    need: Need, fleet: FleetView, away: Callable[[], Sequence[Size]] = tuple
) -> list[Kind] | BatonError:
    """The kinds of decode workers of which some could take it, or why there is none: Unavailable
    (none is there, or only one of those that are `away` could), Overloaded (the queues of all of
    them are full), InvalidRequest (larger than any pool). Errors are values here, not raised.
    Looks at nothing that the workers hold."""
    known = fleet.roster.kinds("decode")
    kinds = [kind for kind in known if kind.takers]
    if not kinds:
        return Unavailable("no decode worker is there: start one, or wait for its start")
    if need.numbers is not None:
        kinds = [kind for kind in kinds if kind.numbers == need.numbers]
        if not kinds:
            return Unavailable(
                "no decode worker is left that computes as the one that began this answer "
                f"(fingerprint {need.numbers[0]}, KV in {need.numbers[1]}): ask again, or start one"
            )
    fitting = [kind for kind in kinds if _holds(need, kind.size)]
    if not fitting:
        return _too_large(need, [*(kind.size for kind in known), *away()])
    over = fleet.passed_over
    if any(_trusts(kind.takers.values(), over) for kind in fitting):
        open_ = [kind for kind in fitting if _trusts(kind.open.values(), over)]
    else:
        open_ = [kind for kind in fitting if kind.open]
    if not open_:
        return Overloaded("every decode worker's queue is full: try again later", BUSY_RETRY_S)
    return open_


def place(
    need: Need,
    fleet: FleetView,
    kinds: Sequence[Kind],
    held: Callable[[Shape], Holders],
    mode: PlacementMode,
    local_prefill_tokens: int,
) -> Placement:
    """The cheapest placement on a decode worker of these `kinds`, which are open."""
    wanted = need.tokens + need.output_tokens * need.sequences
    decode = _ranked(
        _Search(need, fleet.passed_over, held, count=1),
        kinds,
        lambda worker, uncached: (
            uncached * MOVE_COST
            + worker.batch_cost
            + max(0, wanted - worker.room_tokens) * ROOM_COST
        ),
        lambda uncached: (uncached * MOVE_COST, uncached * MOVE_COST + wanted * ROOM_COST),
    )[0]
    if mode == "local":
        return Placement(decode, (), local=True)
    like = [
        kind
        for kind in fleet.roster.kinds("prefill")
        if kind.shape == decode.shape and _computes(need, kind.size)
    ]
    candidates = _ranked(
        _Search(need, fleet.passed_over, held, MAX_CANDIDATES, need.left, decode.degraded),
        like,
        lambda worker, uncached: uncached + worker.queue_tokens,
        lambda uncached: (uncached,),
    )
    holders = held(decode.shape)
    if _stays_local(need, holders, decode, candidates, mode, local_prefill_tokens):
        return Placement(decode, (), local=True)
    return Placement(decode, tuple(candidates), local=False)


@dataclass(frozen=True, slots=True)
class _Search:
    """For the first `count` workers, without those of the boot ids `barred`; those that are
    `degraded` come after those that are not."""

    need: Need
    passed_over: frozenset[bytes]
    held: Callable[[Shape], Holders]
    count: int
    barred: frozenset[bytes] = frozenset()
    degraded: frozenset[bytes] = frozenset()


def _ranked(
    search: _Search,
    kinds: Sequence[Kind],
    price: Callable[[WorkerView, int], int],
    floors: Callable[[int], tuple[int, ...]],
) -> list[WorkerView]:
    """The cheapest first; after them those whose pair with the decode worker is degraded, and last
    those that have failed the request. Those that are passed over only
    where there are no others: others that are full are no reason to ask a worker that fails."""
    need = search.need

    def best(rank: tuple[bool, bool], barred: frozenset[bytes]) -> list[WorkerView]:
        ranking = Ranking(search.count)
        for kind in kinds:
            for workers, others, blocks in search.held(kind.shape).sets():
                uncached = _uncached(need, blocks, kind.size)

                def priced(worker: WorkerView, uncached: int = uncached) -> int | None:
                    boot_id = worker.boot_id
                    if (boot_id in need.avoid, boot_id in search.degraded) != rank:
                        return None
                    if boot_id in barred:
                        return None
                    return price(worker, uncached)

                ranking.search(kind, workers, others, priced, floors(uncached))
        return ranking.views()

    ranks = sorted(product({False, bool(need.avoid)}, {False, bool(search.degraded)}))
    for barred in (search.barred | search.passed_over, search.barred):
        found: list[WorkerView] = []
        for rank in ranks:
            if len(found) < search.count:
                found += best(rank, barred)
        if found:
            return found[: search.count]
    return []


def _trusts(workers: Iterable[WorkerView], passed_over: frozenset[bytes]) -> bool:
    return any(worker.boot_id not in passed_over for worker in workers)


def _stays_local(
    need: Need,
    holders: Holders,
    decode: WorkerView,
    ranked: Sequence[WorkerView],
    mode: PlacementMode,
    local_prefill_tokens: int,
) -> bool:
    """`disaggregated` is never local while a prefill worker is there; `auto` keeps a prompt on the
    decode worker that lacks few tokens, or that computes them at less cost than the first of the
    `ranked` prefill workers."""
    if not ranked:
        return True
    if mode == "disaggregated":
        return False
    here = _uncached(need, holders.blocks(decode), decode.size)
    there = _uncached(need, holders.blocks(ranked[0]), ranked[0].size)
    return here < local_prefill_tokens or local_cost(here) < remote_cost(here, there)


def local_cost(uncached: int) -> int:
    """Return what it costs the decode worker to prefill these tokens by itself."""
    return uncached * LOCAL_COST


def remote_cost(moved: int, uncached: int) -> int:
    """Return what it costs a prefill worker to compute `uncached` tokens, and to move what the
    decode worker lacks. Queues do not count: overload must not turn decode workers into prefill
    workers."""
    return uncached * TOKEN_COST + moved * MOVE_COST


def _uncached(need: Need, held_blocks: int, worker: Size) -> int:
    """Tokens still to be computed there; the last prompt token always is."""
    return need.tokens - min(held_blocks * worker.block_size, need.tokens - 1)


def _holds(need: Need, worker: Size) -> bool:
    """Whether a decode worker takes it, however long it waits: as its own line counts, by the
    longest that one sequence may become, and by the credit of all."""
    size = worker.block_size
    grown = _blocks(need.tokens + need.output_tokens, size)
    credit = grown + (need.sequences - 1) * (grown - need.tokens // size)  # full blocks are shared
    wanted = max(credit, _blocks(need.most_tokens, size))
    return wanted <= worker.total_blocks and need.most_tokens <= worker.max_context


def _computes(need: Need, worker: Size) -> bool:
    """Whether a prefill worker has room for all of the tokens."""
    blocks = _blocks(need.tokens, worker.block_size)
    return blocks <= worker.total_blocks and need.tokens <= worker.max_context


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _too_large(need: Need, decoders: Sequence[Size]) -> BatonError:
    if any(_holds(need, worker) for worker in decoders):
        return Unavailable(
            "no decode worker whose KV pool is large enough takes work just now: ask again"
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
