"""The queue of texts for the tokenizer's threads: which is next.

    put ─▶ tenants, each with its texts ── next: the tenant that has had least, ─▶ thread ─▶ ended
                                           and of it the text that is due first

A text is due when it came plus a second for each AGED_CHARS: short texts pass long ones, and no
text waits for ever. A tenant's turns cost it the characters that they take (start-time fair
queueing), so one tenant's texts, however many and long, delay another's by one text. A long text
cannot be interrupted: one thread is kept from them. Pure: time is given. Owned by the tokenizer.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from baton.runtime.errors import Overloaded

LONG_CHARS = 1 << 16  # some 50 ms
AGED_CHARS = 1 << 20  # a second, as long as a thread takes for them
TURN_CHARS = 256  # a turn costs a tenant no less

_TENANT: ContextVar[bytes] = ContextVar("tenant", default=b"")


@contextmanager
def on_behalf_of(tenant: bytes) -> Iterator[None]:
    """Texts that the block's task has encoded are this tenant's. The validator, which lies between
    a front end and the tokenizer, knows no tenants."""
    before = _TENANT.set(tenant)
    try:
        yield
    finally:
        _TENANT.reset(before)


@dataclass(slots=True, eq=False)
class EncodeJob:
    """`answer` gets what `work`, on a thread, returns or raises."""

    chars: int
    came_s: float
    work: Callable[[], list[int]]
    answer: asyncio.Future[list[int]]
    tenant: bytes = field(default_factory=_TENANT.get)

    @property
    def long(self) -> bool:
        return self.chars > LONG_CHARS

    @property
    def due_s(self) -> float:
        return self.came_s + self.chars / AGED_CHARS


_Entry = tuple[float, int, EncodeJob]  # when it is due, and its number


@dataclass(slots=True)
class _Tenant:
    """`had` are the characters of its turns, counted on from those of the last tenant called."""

    had: int = 0
    waiting: dict[bool, list[_Entry]] = field(default_factory=lambda: {False: [], True: []})

    def __len__(self) -> int:
        return len(self.waiting[False]) + len(self.waiting[True])

    def first(self, long_too: bool) -> _Entry | None:
        heads = [heap[0] for long, heap in self.waiting.items() if heap and (long_too or not long)]
        return min(heads, default=None)

    def last(self) -> EncodeJob:
        return max(max(heap) for heap in self.waiting.values() if heap)[2]


class EncodeQueue:
    """For `threads` threads; `most` texts at most wait or are with one."""

    def __init__(self, most: int, threads: int) -> None:
        self._most = most
        self._threads = threads
        self._tenants: dict[bytes, _Tenant] = {}  # those with texts that wait, or that had more
        self._waiting = 0
        self._running = {False: 0, True: 0}
        self._numbers = 0
        self._had = 0

    def put(self, job: EncodeJob) -> EncodeJob | None:
        """Queue a job. Where the queue is full, the tenant with most texts in it loses the one that
        is due last, which is returned; Overloaded is raised where that would be this one."""
        displaced = None
        if self._waiting + sum(self._running.values()) >= self._most:
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
        """Take the job that a free thread is to do now, if there is one."""
        if not self._waiting or sum(self._running.values()) >= self._threads:
            return None
        long_too = self._running[True] < max(1, self._threads - 1)
        heads = [
            (max(tenant.had, self._had), head, tenant)
            for tenant in self._tenants.values()
            if (head := tenant.first(long_too)) is not None
        ]
        if not heads:
            return None
        self._had, (_, _, job), tenant = min(heads, key=lambda found: found[:2])
        heapq.heappop(tenant.waiting[job.long])
        tenant.had = self._had + max(TURN_CHARS, job.chars)
        self._waiting -= 1
        self._running[job.long] += 1
        self._forget(job.tenant)
        return job

    def ended(self, job: EncodeJob) -> None:
        """Its thread is free."""
        self._running[job.long] -= 1

    def discard(self, job: EncodeJob) -> None:
        """Remove a job that waits; others are left as they are."""
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
        if tenant is not None and not tenant and tenant.had <= self._had:
            del self._tenants[name]
