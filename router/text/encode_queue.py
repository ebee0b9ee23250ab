"""The queue of texts for the tokenizer's threads, fair between tenants.

    put ─▶ tenants, each with its texts ── next: the tenant with the least ─▶ thread ─▶ ended
                                           use, and its text that is due first

A text is due a second after its arrival for each CHARS_PER_SECOND: short texts pass long ones, no
text waits for ever. Each text adds its characters to its tenant's use (start-time fair queueing),
so one tenant's texts, however many and long, delay another's by one text. A long text cannot be
interrupted, so one thread takes none. Pure: time is given. Owned by the tokenizer.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from baton.runtime.errors import Overloaded

LONG_TEXT_CHARS = 1 << 16  # some 50 ms
CHARS_PER_SECOND = 1 << 20  # the speed of a thread
MIN_TURN_CHARS = 256  # the least use that a text adds

_TENANT: ContextVar[bytes] = ContextVar("tenant", default=b"")


@contextmanager
def on_behalf_of(tenant: bytes) -> Iterator[None]:
    """Count the texts that the block's task has encoded as this tenant's. The validator, between
    front end and tokenizer, knows no tenants."""
    before = _TENANT.set(tenant)
    try:
        yield
    finally:
        _TENANT.reset(before)


@dataclass(slots=True, eq=False)
class EncodeJob:
    """`answer` receives what `work` returns or raises on a thread."""

    chars: int
    arrival_s: float
    work: Callable[[], list[int]]
    answer: asyncio.Future[list[int]]
    tenant: bytes = field(default_factory=_TENANT.get)

    @property
    def long(self) -> bool:
        return self.chars > LONG_TEXT_CHARS

    @property
    def due_s(self) -> float:
        return self.arrival_s + self.chars / CHARS_PER_SECOND


_Entry = tuple[float, int, EncodeJob]  # due time, and number


@dataclass(slots=True)
class _Tenant:
    """`used_chars` continues from the use of the tenant that was served last."""

    used_chars: int = 0
    waiting: dict[bool, list[_Entry]] = field(default_factory=lambda: {False: [], True: []})

    def __len__(self) -> int:
        return len(self.waiting[False]) + len(self.waiting[True])

    def first(self, long_too: bool) -> _Entry | None:
        heads = [heap[0] for long, heap in self.waiting.items() if heap and (long_too or not long)]
        return min(heads, default=None)

    def last(self) -> EncodeJob:
        return max(max(heap) for heap in self.waiting.values() if heap)[2]


class EncodeQueue:
    """A queue for `threads` threads; at most `max_texts` wait or are being encoded."""

    def __init__(self, max_texts: int, threads: int) -> None:
        self._max_texts = max_texts
        self._threads = threads
        self._tenants: dict[bytes, _Tenant] = {}  # with waiting texts, or with more use than others
        self._waiting = 0
        self._running = {False: 0, True: 0}
        self._numbers = 0
        self._served_chars = 0

    def put(self, job: EncodeJob) -> EncodeJob | None:
        """Queue a job. If the queue is full, remove and return the last due job of the tenant with
        the most texts; raise Overloaded if that would be this one."""
        displaced = None
        if self._waiting + sum(self._running.values()) >= self._max_texts:
            displaced = self._surplus(job.tenant)
            if displaced is None:
                raise Overloaded("too many prompts wait for tokenization: try again later")
            self.discard(displaced)
        tenant = self._tenants.setdefault(job.tenant, _Tenant())
        self._numbers += 1
        heapq.heappush(tenant.waiting[job.long], (job.due_s, self._numbers, job))
        self._waiting += 1
        return displaced

    def next(self) -> EncodeJob | None:
        """Take the next job for a free thread, if there are both."""
        if not self._waiting or sum(self._running.values()) >= self._threads:
            return None
        long_too = self._running[True] < max(1, self._threads - 1)
        heads = [
            (max(tenant.used_chars, self._served_chars), head, tenant)
            for tenant in self._tenants.values()
            if (head := tenant.first(long_too)) is not None
        ]
        if not heads:
            return None
        self._served_chars, (_, _, job), tenant = min(heads, key=lambda found: found[:2])
        heapq.heappop(tenant.waiting[job.long])
        tenant.used_chars = self._served_chars + max(MIN_TURN_CHARS, job.chars)
        self._waiting -= 1
        self._running[job.long] += 1
        self._forget(job.tenant)
        return job

    def ended(self, job: EncodeJob) -> None:
        """Record that the job's thread is free."""
        self._running[job.long] -= 1

    def discard(self, job: EncodeJob) -> None:
        """Remove a job if it is still waiting."""
        tenant = self._tenants.get(job.tenant, _Tenant())
        left = [entry for entry in tenant.waiting[job.long] if entry[2] is not job]
        self._waiting -= len(tenant.waiting[job.long]) - len(left)
        heapq.heapify(left)
        tenant.waiting[job.long] = left
        self._forget(job.tenant)

    def _surplus(self, mine: bytes) -> EncodeJob | None:
        name = max(self._tenants, key=lambda name: len(self._tenants[name]), default=mine)
        own = len(self._tenants.get(mine, ()))
        if name == mine or len(self._tenants[name]) <= own + 1:
            return None
        return self._tenants[name].last()

    def _forget(self, name: bytes) -> None:
        tenant = self._tenants.get(name)
        if tenant is not None and not tenant and tenant.used_chars <= self._served_chars:
            del self._tenants[name]
