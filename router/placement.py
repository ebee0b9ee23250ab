"""Placement: pure functions from what is known to (decode worker, prefill candidates | local).

Costs are in tokens of prefill work, so that they can be added and read in a log:

    decode worker   moved tokens * MOVE_COST + sequences in its batch * SEQUENCE_COST
                    + tokens that lack KV room * ROOM_COST
    prefill worker  uncached tokens + tokens queued there
    the prompt's    here: uncached tokens * LOCAL_COST
    prefill         there: uncached tokens + moved tokens * MOVE_COST

The router's view is a hint, some hundred milliseconds old; the decode worker grants the credit.
Knows no clock, no network and no request but its sizes. Equal costs: the lower worker id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.runtime.config import PlacementMode
from baton.runtime.errors import BatonError, InvalidRequest, Overloaded, Unavailable

MOVE_COST = 0.1  # moving a token's KV, in tokens computed
SEQUENCE_COST = 8.0  # one sequence more in the batch slows every step
LOCAL_COST = (
    4.0  # a decode worker's step takes a quarter of the prompt tokens, and delays its batch
)
ROOM_COST = 4.0  # a token without room waits for another request's end
MAX_CANDIDATES = 8
BUSY_RETRY_S = 1.0


# Model fingerprint and kind of KV: what workers have in common that compute the same tokens.
Numbers = tuple[str, str]
Shape = tuple[str, str, int]  # those, and the tokens in a block


@dataclass(frozen=True, slots=True)
class Size:
    """What a decode worker can take at most, in tokens of a block, blocks, and tokens. The
    defaults are those of one that has never said: anything."""

    block_size: int = 1
    total_blocks: int = 1 << 31
    max_context: int = 1 << 24


@dataclass(slots=True)
class WorkerView:
    """One worker, as the router sees it now. `shape` is what two pools must share for a
    handoff: fingerprint, dtype, block size. `placed_tokens` were sent there since its last
    load report, `placed_requests` likewise. `held_blocks` is filled in last, by who has matched
    the request's tokens; nothing else is changed."""

    worker_id: str
    boot_id: bytes
    role: str
    address: str
    shape: Shape
    max_context: int = 1 << 24  # tokens of prompt and output
    held_blocks: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    promised_blocks: int = 0
    queued_tokens: int = 0
    placed_tokens: int = 0
    placed_requests: int = 0
    draining: bool = False  # takes nothing new, for whatever reason
    passed_over: bool = False  # its circuit is open: a last resort

    @property
    def numbers(self) -> Numbers:
        return self.shape[:2]

    @property
    def block_size(self) -> int:
        return self.shape[2]

    @property
    def held_tokens(self) -> int:
        return self.held_blocks * self.block_size


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


def open_decoders(
    need: Need,
    workers: Sequence[WorkerView],
    max_waiting: int = 512,
    away: Sequence[Size] = (),
) -> list[WorkerView] | BatonError:
    """The decode workers that could take it, or why there is none: Unavailable (none is there, or
    only one of those that are `away` could), Overloaded (on each of them `max_waiting` requests
    wait for credit), InvalidRequest (larger than any pool). Errors are values here, not raised.
    Looks at nothing that they hold."""
    known = [worker for worker in workers if worker.role == "decode"]
    decoders = [worker for worker in known if not worker.draining]
    if not decoders:
        return Unavailable("no decode worker is there: start one, or wait for its start")
    if need.numbers is not None:
        decoders = [worker for worker in decoders if worker.numbers == need.numbers]
        if not decoders:
            return Unavailable(
                "no decode worker is left that computes as the one that began this answer "
                f"(fingerprint {need.numbers[0]}, KV in {need.numbers[1]}): ask again, or start one"
            )
    fitting = [worker for worker in decoders if _holds(need, worker)]
    if not fitting:
        return _too_large(need, [*known, *away])
    open_ = [
        worker
        for worker in _trusted(fitting)
        if worker.waiting + worker.placed_requests < max_waiting
    ]
    if not open_:
        return Overloaded("every decode worker's queue is full: try again later", BUSY_RETRY_S)
    return open_


def place(
    need: Need,
    workers: Sequence[WorkerView],
    decoders: Sequence[WorkerView],
    mode: PlacementMode,
    local_prefill_tokens: int,
) -> Placement:
    """The cheapest placement on one of the `decoders`, which are open and of the `workers`."""
    decode = min(decoders, key=lambda worker: (worker.boot_id in need.avoid, *_cost(need, worker)))
    there = [e for e in workers if not e.draining and e.boot_id not in need.left]
    like = [e for e in there if e.role == "prefill" and e.shape == decode.shape]
    prefills = _trusted([worker for worker in like if _computes(need, worker)])
    ranked = sorted(
        prefills,
        key=lambda worker: (worker.boot_id in need.avoid, _prefill_cost(need, worker)),
    )
    if _stays_local(need, decode, ranked, mode, local_prefill_tokens):
        return Placement(decode, (), local=True)
    return Placement(decode, tuple(ranked[:MAX_CANDIDATES]), local=False)


def _trusted(workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Without those that are passed over, unless there are no others. Others that are full are
    no reason to ask a worker that fails."""
    return [worker for worker in workers if not worker.passed_over] or workers


def _stays_local(
    need: Need,
    decode: WorkerView,
    ranked: Sequence[WorkerView],
    mode: PlacementMode,
    local_prefill_tokens: int,
) -> bool:
    """`disaggregated` is never local while a prefill worker is there; `auto` keeps a prompt on the
    decode worker that lacks few tokens, or that computes them at less cost than the first of the
    `ranked` prefill workers."""
    if mode == "local" or not ranked:
        return True
    if mode == "disaggregated":
        return False
    if _uncached(need, decode) < local_prefill_tokens:
        return True
    return local_cost(need, decode) < remote_cost(need, decode, ranked[0])


def local_cost(need: Need, decode: WorkerView) -> float:
    """Return what it costs the decode worker to prefill by itself."""
    return _uncached(need, decode) * LOCAL_COST


def remote_cost(need: Need, decode: WorkerView, prefill: WorkerView) -> float:
    """Return what it costs to prefill there and to move what the decode worker lacks. Queues do
    not count: overload must not turn decode workers into prefill workers."""
    return _uncached(need, prefill) + _uncached(need, decode) * MOVE_COST


def _uncached(need: Need, worker: WorkerView) -> int:
    """Tokens still to be computed there; the last prompt token always is."""
    return need.tokens - min(worker.held_tokens, need.tokens - 1)


def _holds(need: Need, worker: WorkerView | Size) -> bool:
    """Whether a decode worker takes it, however long it waits: as its own line counts, by the
    longest that one sequence may become, and by the credit of all."""
    size = worker.block_size
    grown = _blocks(need.tokens + need.output_tokens, size)
    credit = grown + (need.sequences - 1) * (grown - need.tokens // size)  # full blocks are shared
    wanted = max(credit, _blocks(need.most_tokens, size))
    return wanted <= worker.total_blocks and need.most_tokens <= worker.max_context


def _computes(need: Need, worker: WorkerView) -> bool:
    """Whether a prefill worker has room for all of the tokens."""
    blocks = _blocks(need.tokens, worker.block_size)
    return blocks <= worker.total_blocks and need.tokens <= worker.max_context


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _too_large(need: Need, decoders: Sequence[WorkerView | Size]) -> BatonError:
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


def _cost(need: Need, worker: WorkerView) -> tuple[float, str]:
    sequences = worker.running + worker.waiting + worker.placed_requests
    room = (worker.free_blocks - worker.promised_blocks) * worker.block_size
    wanted = need.tokens + need.output_tokens * need.sequences + worker.placed_tokens
    cost = (
        _uncached(need, worker) * MOVE_COST
        + sequences * SEQUENCE_COST
        + max(0, wanted - room) * ROOM_COST
    )
    return cost, worker.worker_id


def _prefill_cost(need: Need, worker: WorkerView) -> tuple[int, str]:
    waiting = worker.queued_tokens + worker.placed_tokens
    return _uncached(need, worker) + waiting, worker.worker_id
