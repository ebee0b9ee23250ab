"""One worker as placement sees it: its hello, its capacity, its load, and what that costs a
request.

A worker whose hello cannot be true is not linked: one wrong number would make the placement of
every request fail, on whichever worker. A prefill worker whose KV no decode worker can take is
linked and reported: no placement names it, and a whole pool would stand idle unseen.

The costs here do not depend on the request, so workers can be kept in their order (roster.py), and
each is computed once: a change of the worker makes another view. They are in microseconds
(worker_costs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast, overload

from baton.proto import worker_pb2
from baton.router.fleet.worker_costs import PRIOR_COSTS, WorkerCosts
from baton.runtime.links import LINK_PROTOCOL_VERSION
from baton.runtime.worker.kv_bridge import bridges

# Of a hello: no smaller than what a worker's own settings allow.
MAX_STEP_TOKENS = 1 << 20
MAX_VALUES = {"block_size": 256, "max_context": 1 << 24, "total_blocks": 1 << 31}
MAX_NAME_CHARACTERS = 256  # of a fingerprint, a KV dtype or a topology
BOOT_ID_BYTES = 16
MAX_TERMS_CHARACTERS = 1024
_FORMAT_FIELDS = ("model fingerprint", "KV dtype", "block size", "terms of KV exchange")
_T = TypeVar("_T")

# Model fingerprint and KV dtype: workers in which these are equal compute the same tokens.
NumericsId = tuple[str, str]
BlockFormat = tuple[str, str, int]  # the same, and tokens a block: identities depend on it


class KvFormat(NamedTuple):
    """The properties by which two workers can hand KV over or not. `terms` are of the
    exchange itself: protocol, layout, checksum and library versions, which differ during some
    upgrades."""

    fingerprint: str
    dtype: str
    block_size: int
    terms: str = ""

    @property
    def of_blocks(self) -> BlockFormat:
        return self[:3]


class ViewProperty(Generic[_T]):
    """A property of a view that is computed when it is first asked for. Until Python 3.12,
    `functools.cached_property` takes a lock, which costs more than most of these."""

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, view: None, owner: type) -> ViewProperty[_T]: ...

    @overload
    def __get__(self, view: object, owner: type) -> _T: ...

    def __get__(self, view: object | None, owner: type) -> ViewProperty[_T] | _T:
        if view is None:
            return self
        found = view.__dict__[self._name] = self._compute(view)
        return found


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """The largest request that a decode worker can take: tokens of a block, blocks, and tokens of a
    sequence. The defaults are for a worker whose capacity is not known: no limit."""

    block_size: int = 1
    total_blocks: int = 1 << 31
    max_context: int = 1 << 24


@dataclass(frozen=True)
class WorkerView:
    """One worker as the router knows it now. Two workers can hand KV over if their `kv_format`s
    fit (`hands_over`). `placed_tokens` and `placed_requests` were sent there since its last load
    report, and take `placed_us` to compute. `expected_end` is that of one more request (see
    WaitEstimator). `bit` is the worker's in the radix index, 0 where that has no blocks of it.
    `joined_s` is when it was linked, on the router's clock."""

    worker_id: str
    boot_id: bytes
    role: str
    address: str
    kv_format: KvFormat
    max_context: int = 1 << 24  # tokens of prompt and output
    running: int = 0  # sequences of a decode worker, prompts of a prefill worker
    active_requests: int = 0  # of a decode worker, that run or have their credit
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    promised_blocks: int = 0
    waiting_blocks: int = 0  # that the waiting requests want
    queued_tokens: int = 0
    queued_pairs: int = 0  # of query and key, of these
    placed_tokens: int = 0
    placed_us: int = 0
    placed_requests: int = 0
    draining: bool = False  # takes no new work, for any reason
    expected_end: tuple[float, float] | None = None
    bit: int = 0
    # GB/s by boot id, of peers that this worker reads slowly
    degraded: Mapping[bytes, float] = field(default_factory=dict)
    joined_s: float = 0.0
    hinted: tuple[int, int] = (0, 0)  # requests and tokens that other routers have just placed
    costs: WorkerCosts = PRIOR_COSTS
    topology: str = ""  # the place that its hello states, from the outermost level to its host

    @property
    def block_size(self) -> int:
        return self.kv_format[2]

    @property
    def numerics(self) -> NumericsId:
        return self.kv_format[:2]

    @ViewProperty
    def capacity(self) -> WorkerCapacity:
        return WorkerCapacity(self.block_size, self.total_blocks, self.max_context)

    @property
    def queued_requests(self) -> int:
        return self.waiting + self.placed_requests

    @ViewProperty
    def room_tokens(self) -> int:
        """Return the room for tokens of KV; negative if more is promised or wanted than there
        is."""
        blocks = self.free_blocks - self.promised_blocks - self.waiting_blocks
        return blocks * self.block_size - self.placed_tokens

    @ViewProperty
    def streams(self) -> int:
        """Return the sequences that are or will be in this decode worker's batch: those that run,
        and the requests whose prompts are being computed or fetched, that wait, or that were placed
        since the last report."""
        begun = max(self.running, self.active_requests)
        return begun + self.queued_requests + self.hinted[0]

    @ViewProperty
    def held_tokens(self) -> int:
        """Return the tokens of KV that requests hold here, or will soon."""
        return (self.total_blocks - self.free_blocks) * self.block_size + self.placed_tokens

    @property
    def queue_tokens(self) -> int:
        """Return the tokens that this worker computes before a new prompt."""
        return self.queued_tokens + self.placed_tokens

    @ViewProperty
    def queue_us(self) -> int:
        """Return the time of what this worker computes before a new prompt."""
        hinted = self.hinted[1] if self.role == "prefill" else 0
        return self.costs.queue_us(self.queued_tokens + hinted, self.queued_pairs) + self.placed_us

    @ViewProperty
    def batch_us(self) -> int:
        """Return the cost of a request's tokens beside those of others on this decode worker."""
        return self.costs.batch_us(self.streams, self.held_tokens)

    @ViewProperty
    def busy_us(self) -> int:
        """Return the cost of a request beside all that is on this decode worker, if it has room:
        its batch, and the prompts that it computes. Those delay a request once: its own prompt if
        that is computed here too, else its first tokens."""
        return self.batch_us + self.queue_us

    @ViewProperty
    def credit_us(self) -> int:
        """Return the cost of each token for which this decode worker has no room."""
        return self.costs.credit_us(self.total_blocks * self.block_size)

    @ViewProperty
    def full_us(self) -> int:
        """Return the cost of a request on this decode worker if it has no room, less `credit_us`
        for each of the request's tokens."""
        return self.busy_us - self.room_tokens * self.credit_us


class ViewOwner(Protocol):
    def note_change(self) -> None: ...


class ViewField(Generic[_T]):
    """A field of a link that the worker's view is made of: assigning another object calls
    `note_change`, so no assignment can leave a stale view. Changes inside a value do not."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_view_{name}"

    @overload
    def __get__(self, link: None, owner: type) -> ViewField[_T]: ...

    @overload
    def __get__(self, link: ViewOwner, owner: type) -> _T: ...

    def __get__(self, link: ViewOwner | None, owner: type) -> ViewField[_T] | _T:
        return self if link is None else cast(_T, link.__dict__[self._name])

    def __set__(self, link: ViewOwner, value: _T) -> None:
        if link.__dict__.get(self._name, self) is not value:
            link.__dict__[self._name] = value
            link.note_change()


def capacity_of(hello: worker_pb2.WorkerHello) -> WorkerCapacity:
    return WorkerCapacity(hello.block_size, hello.total_blocks, hello.max_context)


def kv_format_of(hello: worker_pb2.WorkerHello) -> KvFormat:
    return KvFormat(hello.model_fingerprint, hello.kv_dtype, hello.block_size, hello.kv_terms)


def hands_over(granter: KvFormat, reader: KvFormat) -> bool:
    """Return whether a worker can read the KV of another, which may convert it, in blocks of which
    one size divides the other. Their handshake refuses terms that differ."""
    size, own_size = granter.block_size, reader.block_size
    alike = granter.fingerprint == reader.fingerprint and granter.terms == reader.terms
    sizes_fit = max(size, own_size) % min(size, own_size) == 0
    return alike and sizes_fit and bridges(granter.dtype, reader.dtype)


def incompatible_prefill_workers(
    prefill: Mapping[str, KvFormat], decode: Mapping[str, KvFormat]
) -> dict[str, str]:
    """Return, for each prefill worker whose KV no decode worker can read, what differs from the
    most similar one. Empty while there is no decode worker to compare with."""
    formats = set(decode.values())
    found = {}
    for worker_id, kv_format in prefill.items():
        if formats and not any(hands_over(kv_format, other) for other in formats):
            nearest = min(sorted(formats), key=lambda other: len(_differences(kv_format, other)))
            found[worker_id] = "; ".join(_differences(kv_format, nearest))
    return found


def _differences(kv_format: KvFormat, other: KvFormat) -> list[str]:
    pairs = zip(_FORMAT_FIELDS, kv_format, other, strict=True)
    return [
        f"{name} {own!r}, decode workers have {its!r}" for name, own, its in pairs if own != its
    ]


def handshake_fault(hello: worker_pb2.WorkerHello, vocab_size: int) -> str | None:
    """Return the first field that cannot be true, with its value and the expected one; None if
    all are plausible. `vocab_size` is that of the router's model."""
    if hello.protocol_version != LINK_PROTOCOL_VERSION:
        return (
            f"protocol_version is {hello.protocol_version}, this router's is "
            f"{LINK_PROTOCOL_VERSION}"
        )
    if len(hello.boot_id) != BOOT_ID_BYTES:
        return f"boot_id has {len(hello.boot_id)} bytes, not {BOOT_ID_BYTES}"
    for name, largest in MAX_VALUES.items():
        value = getattr(hello, name)
        if not 1 <= value <= largest:
            return f"{name} is {value}, not from 1 to {largest}"
    for name in ("step_tokens", "chunk_tokens"):  # 0: not stated
        if (value := getattr(hello, name)) > MAX_STEP_TOKENS:
            return f"{name} is {value}, not at most {MAX_STEP_TOKENS}"
    for name in ("model_fingerprint", "kv_dtype"):
        length = len(getattr(hello, name))
        if not 1 <= length <= MAX_NAME_CHARACTERS:
            return f"{name} has {length} characters, not 1 to {MAX_NAME_CHARACTERS}"
    if len(hello.topology) > MAX_NAME_CHARACTERS:
        return f"topology has {len(hello.topology)} characters, not at most {MAX_NAME_CHARACTERS}"
    if len(hello.kv_terms) > MAX_TERMS_CHARACTERS:
        return f"kv_terms has {len(hello.kv_terms)} characters, not at most {MAX_TERMS_CHARACTERS}"
    if hello.vocab_size != vocab_size:
        return f"vocab_size is {hello.vocab_size}, this router's model has {vocab_size}"
    return None
